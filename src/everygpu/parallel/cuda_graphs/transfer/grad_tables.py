"""Where parameters and gradients are in memory, block by block, for kernels that find them there."""

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from everygpu.parallel.buckets.plan import BLOCK_NUMEL, BucketPlan, Slot

ALIGNMENT_BYTES = 16
"""Of what the kernels load at a time."""


def addresses(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return where tensors are in memory, for kernels on a device; shape (tensors,), int64."""
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)


def block_lengths(plan: BucketPlan, chunk: int, members: Container[int] | None = None) -> Tensor:
    """Return how many elements of a parameter are in each block of a chunk; shape (blocks,), int32, on the CPU.

    Args:
        plan: Every parameter begins with a block.
        chunk: Which chunk.
        members: The parameters that count; all when left out.
    """
    lengths = torch.zeros(plan.num_blocks, dtype=torch.int32, device="cpu")
    for piece in plan.pieces(chunk):
        if members is not None and piece.index not in members:
            continue
        lengths[piece.blocks] = BLOCK_NUMEL
        if piece.numel % BLOCK_NUMEL:
            lengths[piece.blocks.stop - 1] = piece.numel % BLOCK_NUMEL
    return lengths


def block_addresses(plan: BucketPlan, chunk: int, tensors: Mapping[int, Tensor], missing: int = 0) -> Tensor:
    """Return where the blocks of a chunk are in memory beside the bucket; shape (blocks,), int64, on the CPU.

    Args:
        plan: Every parameter begins with a block.
        chunk: Which chunk.
        tensors: By parameter, laid out as its slot.
        missing: The address of blocks that have none.
    """
    found = torch.full((plan.num_blocks,), missing, dtype=torch.int64, device="cpu")
    for piece in plan.pieces(chunk):
        if piece.index in tensors:
            steps = (piece.offset + torch.arange(0, piece.numel, BLOCK_NUMEL, device="cpu")) * plan.dtype.itemsize
            found[piece.blocks] = tensors[piece.index].data_ptr() + steps
    return found


def is_laid_out(t: Tensor, slot: Slot) -> bool:
    """Tell whether a tensor's memory is in the order of a slot, and aligned as kernels need it."""
    return t.stride() == slot.strides and t.data_ptr() % ALIGNMENT_BYTES == 0


def lay_out(grad: Tensor | None, slot: Slot, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a gradient laid out as its parameter's slot, in its parameter's dtype: itself, most often.

    Args:
        grad: None for zeros.
        slot: The parameter's.
        dtype: The parameter's.
        device: Where the gradient is.
    """
    if grad is not None and grad.dtype is dtype and is_laid_out(grad, slot):
        return grad
    laid = torch.zeros(slot.numel, dtype=dtype, device=device)
    if grad is not None:
        laid.as_strided(slot.shape, slot.strides).copy_(grad)
    return laid


class GradTables:
    """Tables of gradients' addresses, filled after the recording: its memory stays where it is.

    Args:
        plan: The bucket's; every parameter begins with a block.
        readers: Devices that read gradients, one for each chunk.
        sources: Devices that have gradients, one for each replica.
        missing: For each reader the address that blocks have which a replica has no gradient for.
    """

    def __init__(
        self,
        plan: BucketPlan,
        readers: Sequence[torch.device],
        sources: Sequence[torch.device],
        missing: Sequence[int] | None = None,
    ) -> None:
        self._plan = plan
        self._sources = list(sources)
        self._missing = missing or [0] * len(readers)
        self._grads: list[dict[int, Tensor]] = [{} for _ in sources]
        self._are_written = False
        shape = len(sources), plan.num_blocks
        self.tables = [torch.zeros(shape, dtype=torch.int64, device=d) for d in readers]
        """For each reader, the addresses of all replicas' gradients for the blocks of its chunk."""

    def take(self, replica: int, grads: Mapping[int, Tensor | None]) -> bool:
        """Keep gradients where they are, or lay them out as their parameters on the current stream.

        Args:
            replica: Which replica they are of.
            grads: By parameter; zeros are made in place of None.
        Returns:
            Whether memory was made: these gradients are ready later than backward's own.
        """
        plan, device = self._plan, self._sources[replica]
        slots = [slot for slot in plan.slots if slot.index in grads]
        taken = {slot.index: lay_out(grads[slot.index], slot, plan.dtype, device) for slot in slots}
        self._grads[replica].update(taken)
        return any(t is not grads[i] for i, t in taken.items())

    def write(self) -> None:
        """Fill the tables, once; while recording that would be part of each launch."""
        if self._are_written:
            return
        for rank, (table, missing) in enumerate(zip(self.tables, self._missing)):
            table.copy_(torch.stack([block_addresses(self._plan, rank, grads, missing) for grads in self._grads]))
        self._are_written = True

    def forget(self) -> None:
        """Let go of the gradients, where a recording keeps their memory; after ``write``."""
        self._grads = [{} for _ in self._sources]
