"""Where the gradients of a training step are, and what applies them."""

from typing import Any, Protocol

from torch import Tensor

from everygpu.parallel.buckets.kept import KeptBucket
from everygpu.step.update import Share


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

    def reduce(self) -> list[Share]:
        """Add the gradients of all replicas up, and return each device's part."""

    def apply(self, found_inf: Tensor | None) -> None:
        """Step the optimizer; not at all where ``found_inf`` is not 0."""

    def fuse(self, factor: float) -> bool:
        """Reduce, multiply by a factor and apply in one go; or do nothing and return False."""

    def refresh(self) -> None:
        """Send the parameters to every device."""

    def kept(self) -> list[KeptBucket]:
        """Return the parameters of which each device keeps a copy from step to step."""
