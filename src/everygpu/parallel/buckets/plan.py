"""Parameters side by side in flat buckets, each cut into one chunk per device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from everygpu.parallel.buckets.grouping import aligned_offsets, dense_strides, group_by_storage, storage_offsets
from everygpu.parallel.buckets.memory import fill_views
from everygpu.parallel.buckets.sizes import UPDATE_BYTES

BLOCK_NUMEL = 1024
"""Parameters begin at, and chunks are whole multiples of: what one program of an update kernel works on."""

ALIGNMENT_BYTES = 16
"""Of what the kernels load at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a parameter lies in its bucket."""

    index: int
    """Which parameter."""
    start: int
    numel: int
    shape: torch.Size
    strides: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter's place in a bucket's memory, shaped as the parameter is."""
        return flat.as_strided(self.shape, self.strides, int(flat.storage_offset()) + self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a chunk holds of a parameter."""

    index: int
    """Which parameter."""
    start: int
    """Where the piece begins in the chunk."""
    offset: int
    """Where it begins in the parameter's own memory."""
    numel: int

    @property
    def blocks(self) -> slice:
        """Which of the chunk's blocks it is in; it begins with one."""
        first = self.start // BLOCK_NUMEL
        return slice(first, first - (-self.numel // BLOCK_NUMEL))


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Parameters of one dtype that travel together."""

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    chunk_numel: int
    num_chunks: int
    has_gaps: bool
    """There are elements that are no parameter's."""

    @property
    def numel(self) -> int:
        """Elements in the whole bucket, the gaps between parameters included."""
        return self.chunk_numel * self.num_chunks

    @property
    def num_blocks(self) -> int:
        """Blocks in one chunk."""
        return self.chunk_numel // BLOCK_NUMEL

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return all parameters' places in a bucket's memory, in the order of ``slots``."""
        view, begin = flat.as_strided, int(flat.storage_offset())
        return [view(slot.shape, slot.strides, begin + slot.start) for slot in self.slots]

    def make_flat(self, device: torch.device) -> Tensor:
        """Make a bucket's memory; zeros."""
        return torch.zeros(self.numel, dtype=self.dtype, device=device)

    def make_chunk(self, device: torch.device) -> Tensor:
        """Make a chunk's memory; zeros."""
        return torch.zeros(self.chunk_numel, dtype=self.dtype, device=device)

    def flatten(self, tensors: Mapping[int, Tensor | None], device: torch.device) -> Tensor:
        """Put tensors side by side in new memory.

        Args:
            tensors: By parameter, on the device; zeros take the place of one that is missing or None.
            device: Where the memory is.
        """
        flat = (torch.zeros if self.has_gaps else torch.empty)(self.numel, dtype=self.dtype, device=device)
        self.fill(flat, tensors)
        return flat

    def fill(self, flat: Tensor, tensors: Mapping[int, Tensor | None]) -> None:
        """Put tensors side by side in memory of this plan's.

        Args:
            flat: The memory, with zeros in the gaps.
            tensors: By parameter, on the same device; zeros take the place of one that is missing or None.
        """
        found = [tensors.get(slot.index) for slot in self.slots]
        if any(t is None for t in found):
            flat.zero_()
        fill_views(self.views(flat), found)

    def pieces(self, chunk: int) -> Iterator[Piece]:
        """List what the ``chunk``-th chunk holds."""
        begin, end = chunk * self.chunk_numel, (chunk + 1) * self.chunk_numel
        for slot in self.slots:
            first, last = max(begin, slot.start), min(end, slot.start + slot.numel)
            if first < last:
                yield Piece(index=slot.index, start=first - begin, offset=first - slot.start, numel=last - first)
            elif slot.numel == 0 and chunk == 0:  # optimizers keep a state for it all the same
                yield Piece(index=slot.index, start=0, offset=0, numel=0)


def plan_buckets(params: Sequence[Tensor], num_chunks: int, limit_bytes: int = UPDATE_BYTES) -> list[BucketPlan]:
    """Lay parameters out in buckets.

    Args:
        params: Strided; of any dtypes and shapes. Those that lie side by side in one storage, as a recurrent
            layer's weights, stay so.
        num_chunks: Devices that share the work.
        limit_bytes: Size at which a bucket is closed; a larger parameter has one of its own.
    Returns:
        Buckets in the order in which backward usually finishes them: the last parameters first.
    """
    backwards = range(len(params))[::-1]
    return [
        plan_bucket(params, members, num_chunks, together=together)
        for members, together in group_by_storage(params, backwards, limit_bytes)
    ]


def plan_bucket(
    params: Sequence[Tensor],
    members: Sequence[int],
    num_chunks: int,
    *,
    together: bool = False,
    unit: int = BLOCK_NUMEL,
) -> BucketPlan:
    """Lay parameters out in one bucket.

    Args:
        params: Strided; of any shapes.
        members: Which of them, in order, as indices; of one dtype.
        num_chunks: Devices that share the work.
        together: They lie side by side in one storage, and stay so.
        unit: Parameters begin at, and chunks are whole multiples of so many elements.
    """
    tensors = [params[i] for i in members]
    starts, end = storage_offsets(tensors) if together else aligned_offsets(tensors, unit)
    slots = [
        Slot(index=i, start=start, numel=t.numel(), shape=t.shape, strides=dense_strides(t))
        for i, t, start in zip(members, tensors, starts)
    ]
    chunk_numel = -(-end // (num_chunks * unit)) * unit
    has_gaps = sum(t.numel() for t in tensors) < chunk_numel * num_chunks
    return BucketPlan(
        dtype=tensors[0].dtype,
        slots=tuple(slots),
        chunk_numel=chunk_numel,
        num_chunks=num_chunks,
        has_gaps=has_gaps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRange:
    """Blocks of one dtype, side by side in tables that have the blocks of one chunk of each bucket in them."""

    first: int
    num_blocks: int
    dtype: torch.dtype


def block_ranges(plans: Sequence[BucketPlan]) -> list[BlockRange]:
    """Return where each bucket's blocks are in a device's tables: the same places on every device."""
    spans, first = [], 0
    for plan in plans:
        spans.append(BlockRange(first=first, num_blocks=plan.num_blocks, dtype=plan.dtype))
        first += spans[-1].num_blocks
    return spans


def join_ranges(spans: Sequence[BlockRange]) -> list[BlockRange]:
    """Put neighbours of one dtype together."""
    joined: list[BlockRange] = []
    for span in spans:
        if joined and joined[-1].dtype is span.dtype:
            span = replace(span, first=joined[-1].first, num_blocks=joined.pop().num_blocks + span.num_blocks)
        joined.append(span)
    return joined


def addresses(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return where tensors are in memory, for kernels on a device; shape (tensors,), int64."""
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)


def block_lengths(plan: BucketPlan, chunk: int) -> Tensor:
    """Return how many elements of a parameter are in each block of a chunk; shape (blocks,), int32, on the CPU."""
    lengths = torch.zeros(plan.num_blocks, dtype=torch.int32, device="cpu")
    for piece in plan.pieces(chunk):
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
