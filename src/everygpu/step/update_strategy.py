"""Where the gradients of a training step are, and what applies them."""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from everygpu.parallel.buckets.kept import KeptBucket
from everygpu.step.update import Share


class FusedStatus(NamedTuple):
    """What kernels say of an update that they were queued for."""

    status: Tensor
    """See ``FiniteCheck``."""
    counted: set[int]
    """Parameters that an update is counted for, whether the kernels leave it out or not."""
    norm: Tensor | None = None
    """Of the whole gradient before it was clipped, where it had to be known."""


class UpdateStrategy(Protocol):
    """Where backward puts the gradients, and what becomes of them."""

    def prepare(self) -> None:
        """Take note of what has changed since the last step."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model on all devices."""

    def leaves(self) -> list[Tensor]:
        """List the parameters of which each replica has a leaf of its own."""

    def begin(self) -> None:
        """Start with no gradients."""

    def attach_grads(self) -> None:
        """Prepare for a backward."""

    def detach_grads(self) -> None:
        """Clean up after a backward."""

    def adding_up(self, *, is_only: bool) -> AbstractContextManager[None]:
        """Add the gradients of a backward within up over ranks, where that can go on beside it.

        Args:
            is_only: It is the only one of its update.
        """

    def flags(self) -> Tensor | None:
        """Return, under ranks, 1 for each parameter that has got a gradient; None where gradients bring that along."""

    def take_flags(self, flags: Tensor | None) -> None:
        """Take note of all ranks' flags, added up."""

    def reduce(self) -> list[Share]:
        """Add the gradients of all replicas up, and return each device's part."""

    def apply(self, found_inf: Tensor | None, *, is_common: bool = True) -> set[int] | None:
        """Step the optimizer; not at all where ``found_inf`` is not 0.

        Args:
            found_inf: Shape (), on the first device.
            is_common: It is often not 0: such an update may not be counted even for a while.
        Returns:
            Parameters that an update is counted for whatever ``found_inf`` is; None where the optimizer knows.
        """

    def fuse(self, factor: float | Tensor, losses: Tensor | None) -> FusedStatus | None:
        """Reduce, multiply by a factor and apply in one go; or do nothing and return None.

        Args:
            factor: A tensor has shape () and is on the first device.
            losses: Their sum; nothing is updated where it isn't finite.
        """

    def uncount(self, counted: set[int]) -> None:
        """Have an update of parameters not be counted."""

    def refresh(self) -> None:
        """Send the parameters to every device."""

    def kept(self) -> list[KeptBucket]:
        """Return the parameters of which each device keeps a copy from step to step."""
