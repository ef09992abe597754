"""A bucket whose copies are written whole before each use, at addresses that stay."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from everygpu import comm
from everygpu.parallel.buckets.bucket import ALIGNMENT_BYTES
from everygpu.parallel.buckets.memory import versions_of
from everygpu.parallel.buckets.plan import plan_bucket


class FixedBucket:
    """Tensors of one dtype, with a copy on every other device, whatever still refers to the copies.

    Args:
        originals: At least one tensor, dense, all of one dtype; of these shapes and strides as long as this lives.
        device: Where they are.
        devices: Where the copies go.
        keep_storage: Lay the copies out as the originals are in the one storage they share, not side by side.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self, originals: Sequence[Tensor], device: torch.device, devices: Sequence[torch.device], *, keep_storage: bool
    ) -> None:
        unit = 1 if keep_storage else max(1, ALIGNMENT_BYTES // originals[0].element_size())
        self.plan = plan_bucket(originals, range(len(originals)), 1, together=keep_storage, unit=unit)
        self.grad_plan = plan_bucket(originals, range(len(originals)), 1, unit=1)
        """How gradients travel: without gaps, as they aren't computed with where they lie."""
        self.originals = list(originals)
        self._device = device
        self._flats = [self.plan.make_flat(d) for d in devices]
        # .data gives each slot a version counter of its own.
        self.slots = [[view.data for view in self.plan.views(flat)] for flat in self._flats]
        """For each of ``devices`` the copies."""
        self.versions = versions_of(originals)
        """How often each original had been written when it was sent last."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def send(self) -> None:
        """Write the copies; graphs that need what they were before notice it, as far as torch counts the writes."""
        before, self.versions = self.versions, versions_of(self.originals)
        if before != self.versions:
            written = [i for i, (then, now) in enumerate(zip(before, self.versions)) if then != now]
            increment_version([row[i] for row in self.slots for i in written])
        comm.broadcast(self.plan.flatten(dict(enumerate(self.originals)), self._device), self._flats)
