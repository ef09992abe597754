"""Where a recorded backward leaves gradients, for kernels that read them there."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from everygpu.parallel.buckets.plan import BucketPlan, block_addresses, lay_out


class GradTables:
    """Tables of gradients' addresses, filled after the recording: its memory stays where it is.

    Args:
        plans: The buckets; every parameter begins with a block.
        readers: Devices that read gradients, one for each chunk.
        sources: Devices that have gradients, one for each replica.
        missing: For each reader the address that blocks have which a replica has no gradient for.
    """

    def __init__(
        self,
        plans: Sequence[BucketPlan],
        readers: Sequence[torch.device],
        sources: Sequence[torch.device],
        missing: Sequence[int] | None = None,
    ) -> None:
        self._plans = plans
        self._sources = list(sources)
        self._missing = missing or [0] * len(readers)
        self._grads: list[dict[int, Tensor]] = [{} for _ in sources]
        self._are_written = False
        shape = len(sources), sum(plan.num_blocks for plan in plans)
        self.tables = [torch.zeros(shape, dtype=torch.int64, device=d) for d in readers]
        """For each reader, the addresses of all replicas' gradients for the blocks of its chunks."""

    def take(self, bucket: int, replica: int, grads: Mapping[int, Tensor | None]) -> bool:
        """Keep gradients where they are, or lay them out as their parameters on the current stream.

        Args:
            bucket: Which plan they are of.
            replica: Which replica they are of.
            grads: By parameter; zeros are made in place of None.
        Returns:
            Whether memory was made: these gradients are ready later than backward's own.
        """
        plan, device = self._plans[bucket], self._sources[replica]
        slots = [slot for slot in plan.slots if slot.index in grads]
        taken = {slot.index: lay_out(grads[slot.index], slot, plan.dtype, device) for slot in slots}
        self._grads[replica].update(taken)
        return any(t is not grads[i] for i, t in taken.items())

    def write(self) -> None:
        """Fill the tables, once; while recording that would be part of each launch."""
        if self._are_written:
            return
        for rank, (table, missing) in enumerate(zip(self.tables, self._missing)):
            rows = [[block_addresses(plan, rank, grads, missing) for plan in self._plans] for grads in self._grads]
            table.copy_(torch.stack([torch.cat(row) for row in rows]))
        self._are_written = True

    def forget(self) -> None:
        """Let go of the gradients, where a recording keeps their memory; after ``write``."""
        self._grads = [{} for _ in self._sources]
