"""Sums over ranks, beside what the device computes."""

from typing import TYPE_CHECKING

from everygpu.progress import running

if TYPE_CHECKING:
    import torch.distributed as dist


class Sum:
    """A sum over ranks that has begun."""

    def __init__(self, work: "dist.Work") -> None:
        self._work = work

    def wait(self) -> None:
        """Wait for it; on GPUs, have the current stream wait."""
        with running("sum over ranks", waits_for="ranks"):
            self._work.wait()
