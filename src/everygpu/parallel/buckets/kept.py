"""Parameters that several devices keep a copy of, from one step to the next."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from everygpu.parallel.buckets.plan import BucketPlan

WORD_BYTES = 8
"""Memory is compared by words of this size, and begins at a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBucket:
    """Copies of parameters of one dtype, laid out alike on all devices."""

    plan: BucketPlan
    params: Mapping[int, Tensor]
    """The parameters on the primary device, by slot."""
    flats: list[Tensor]
    """Flat memory on each device; without the primary's where parameters are not side by side there."""
    is_flat: bool
    """Whether they are side by side on the primary device."""

    def memory(self) -> list[Tensor]:
        """Return each copy's flat memory, the primary's first.

        Parameters that aren't side by side on the primary device are copied, unless there is just one.
        """
        if self.is_flat:
            return self.flats
        end = max(slot.start + slot.numel for slot in self.plan.slots)
        return [flat[:end] for flat in (self._on_primary(), *self.flats)]

    def _on_primary(self) -> Tensor:
        slot, p = self.plan.slots[0], self.params[self.plan.slots[0].index]
        is_whole = len(self.params) == 1 and slot.start == 0 and p.stride() == slot.strides
        if is_whole and p.storage_offset() * p.element_size() % WORD_BYTES == 0:
            return p.data.as_strided((p.numel(),), (1,))  # uncopied, as it may be large; writes to it aren't counted
        return self.plan.flatten(self.params, p.device)
