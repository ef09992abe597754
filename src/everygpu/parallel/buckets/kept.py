"""Parameters that several devices keep a copy of, from one step to the next."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from everygpu.parallel.buckets.plan import BucketPlan, Slot


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
        """Return each copy's flat memory, the primary's first, which is a copy of the parameters where it isn't flat.

        Without what lies behind the last parameter: it depends on the number of devices.
        """
        first = next(iter(self.params.values()))
        flats = self.flats if self.is_flat else [self.plan.flatten(self.params, first.device), *self.flats]
        end = max(slot.start + slot.numel for slot in self.plan.slots)
        return [flat[: -(-end // 8) * 8] for flat in flats]

    def put_back(self, slot: Slot, memory: Tensor) -> None:
        """Have a parameter be what is in the primary's memory, as ``memory`` returned it."""
        if not self.is_flat:
            self.params[slot.index].data.copy_(slot.view(memory))
