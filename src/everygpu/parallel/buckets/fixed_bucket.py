"""A bucket whose copies are written whole before each use, at addresses that stay."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from everygpu import comm
from everygpu.parallel.buckets.bucket import ALIGNMENT_BYTES
from everygpu.parallel.buckets.memory import versions_of
from everygpu.parallel.buckets.plan import BucketPlan, plan_bucket


class FixedBucket:
    """Tensors of one dtype, with a copy on every other device, whatever still refers to the copies.

    Sending takes few calls, however many tensors there are.

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
        self._addresses: list[int] = []
        self._pieces: list[Tensor] | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def send(self) -> None:
        """Write the copies; graphs that need what they were before notice it, as far as torch counts the writes."""
        before, self.versions = self.versions, versions_of(self.originals)
        if before != self.versions:
            written = [i for i, (then, now) in enumerate(zip(before, self.versions)) if then != now]
            increment_version([row[i] for row in self.slots for i in written])
        comm.broadcast(self._flatten(), self._flats)

    def _flatten(self) -> Tensor:
        addresses = list(map(Tensor.data_ptr, self.originals))
        if addresses != self._addresses:
            self._addresses, self._pieces = addresses, _pieces_of(self.plan, self.originals, self._device)
        if self._pieces is None:
            return self.plan.flatten(dict(enumerate(self.originals)), self._device)
        return torch.cat(self._pieces)


def _pieces_of(plan: BucketPlan, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor] | None:
    """Return views of tensors that are a bucket's memory, one after another; None where memory is in another order."""
    if any(t.stride() != slot.strides for t, slot in zip(tensors, plan.slots)):
        return None
    pieces, end = [], 0
    for slot, t in sorted(zip(plan.slots, tensors), key=lambda pair: pair[0].start):
        if slot.start > end:
            pieces.append(torch.zeros(slot.start - end, dtype=plan.dtype, device=device))
        pieces.append(t.detach().as_strided((slot.numel,), (1,)))
        end = slot.start + slot.numel
    return [*pieces, torch.zeros(plan.numel - end, dtype=plan.dtype, device=device)]
