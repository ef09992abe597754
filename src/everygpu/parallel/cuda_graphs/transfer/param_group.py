"""Trainable parameters that travel together within a recording, and their gradients on the way back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from everygpu import comm
from everygpu.parallel.buckets.memory import Grads, fill_views, make_twins, put_back
from everygpu.parallel.buckets.plan import plan_bucket
from everygpu.parallel.cuda_graphs.transfer.backends import (
    CopyBackend,
    KernelBackend,
    TransferBackend,
    can_use_kernels,
)


class ParamGroup:
    """Parameters of one dtype, with a leaf twin of each on every device after the first, in flat memory that stays.

    Args:
        originals: On ``devices[0]``, dense.
        devices: One per replica.
        rooms: For each device a table; at ``index``, where this group's sums go.
        index: This group's place among others.
    """

    def __init__(
        self, originals: Sequence[Tensor], devices: Sequence[torch.device], rooms: Sequence[Tensor], index: int
    ) -> None:
        self.originals = list(originals)
        self._devices = list(devices)
        self._plan = plan_bucket(originals, range(len(originals)), len(devices))
        flats = [self._plan.make_flat(d) for d in devices[1:]]
        # .data gives each a version counter of its own.
        self._slots = [[v.data for v in views] for views in map(self._plan.views, flats)]
        self.twins = [make_twins(originals, slots) for slots in self._slots]
        self.backend: TransferBackend = (
            KernelBackend(originals, flats, devices, rooms, index)
            if can_use_kernels(originals, self._plan, devices)
            else CopyBackend(originals, self._plan, flats, devices)
        )
        self._total: Tensor | None = None

    def leaves(self) -> list[list[Tensor]]:
        """Return for each device what a recording takes gradients of.

        On the first device not the parameters themselves, but leaves of the same memory, which count writes together:
        autograd accumulates the parameters' gradients on streams that are none of the recording's.
        """
        return [make_twins(self.originals, [t.detach() for t in self.originals]), *self.twins]

    def put_back(self, leaves: Sequence[Sequence[Tensor]], homes: Sequence[Tensor]) -> None:
        """Have leaves be where they were made: a forward may move them, as that of a recurrent layer.

        Args:
            leaves: What ``leaves`` returned.
            homes: The originals' memory then; another forward may have moved these since.
        """
        for tensors, slots in zip(leaves, [homes, *self._slots]):
            put_back(tensors, slots)

    def sent(self) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter with where the backend sends it on the second device."""
        return list(zip(self.originals, self._slots[0])) if self._slots else []

    def make_room(self) -> int:
        """Make memory for the sums of a launch, or of ``add``, on the current stream; return its address."""
        self._total = self.backend.make_room()
        return self._total.data_ptr()

    def add(self, grads: Sequence[Grads]) -> None:
        """Add gradients up that are no recording's.

        Args:
            grads: For each device those of its parameters, None where one took no part.
        """
        pairs = [(row, d) for row, d in zip(grads, self._devices) if any(g is not None for g in row)]
        flats = [self._plan.flatten(dict(enumerate(row)), d) for row, d in pairs]
        if flats:
            total = comm.reduce(flats, self._devices[0])
            fill_views(self._plan.views(self._room()), self._plan.views(total))

    def totals(self) -> list[Tensor]:
        """Return the last sums, in memory of their own on the first device."""
        total, self._total = self._room(), None
        return self._plan.views(self.backend.hand_over(total))

    def _room(self) -> Tensor:
        assert self._total is not None  # noqa: S101 - ``make_room`` has made it
        return self._total
