"""Tensors side by side in flat buckets, each cut into one chunk per device."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everygpu.parallel.buckets.memory import fill_views
from everygpu.parallel.buckets.sizes import UPDATE_BYTES

BLOCK_NUMEL = 1024
"""Parameters begin at, and chunks are whole multiples of: what one program of an update kernel works on."""

WORD_BYTES = 8
"""Kept memory is compared by words of this size, and begins at a multiple of it."""


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
    """Tensors of one dtype that travel together."""

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    places: tuple[tuple[torch.Size, tuple[int, ...], int], ...]
    """Shape, strides and start of each slot."""
    chunk_numel: int
    num_chunks: int
    has_gaps: bool
    """There are elements that are no parameter's."""

    @property
    def numel(self) -> int:
        return self.chunk_numel * self.num_chunks

    @property
    def num_blocks(self) -> int:
        """Blocks in one chunk."""
        return self.chunk_numel // BLOCK_NUMEL

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return all parameters' places in a bucket's memory, in the order of ``slots``."""
        view, begin = flat.as_strided, int(flat.storage_offset())
        return [view(shape, strides, begin + start) for shape, strides, start in self.places]

    def make_flat(self, device: torch.device) -> Tensor:
        """Make a bucket's memory; zeros."""
        return torch.zeros(self.numel, dtype=self.dtype, device=device)

    def make_chunk(self, device: torch.device) -> Tensor:
        """Make a chunk's memory; zeros."""
        return torch.zeros(self.chunk_numel, dtype=self.dtype, device=device)

    def flatten(self, tensors: Mapping[int, Tensor | None], device: torch.device) -> Tensor:
        """Put tensors side by side in new memory on their device, with zeros in gaps and for those that are missing."""
        found = [tensors.get(slot.index) for slot in self.slots]
        has_zeros = self.has_gaps or any(t is None for t in found)
        flat = (torch.zeros if has_zeros else torch.empty)(self.numel, dtype=self.dtype, device=device)
        fill_views(self.views(flat), found)
        return flat

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
    """Lay parameters out in buckets, in the order in which backward usually finishes them: the last ones first."""
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
    """Lay parameters of one dtype out in one bucket.

    Args:
        params: Strided; of any shapes.
        members: Which of them, in order, as indices.
        num_chunks: Devices that share the work.
        together: They lie side by side in one storage, as a recurrent layer's weights, and stay so.
        unit: Parameters begin at, and chunks are whole multiples of so many elements.
    """
    tensors = [params[i] for i in members]
    if together:
        starts = [int(t.storage_offset()) for t in tensors]
        end = tensors[0].untyped_storage().nbytes() // tensors[0].element_size()
    else:
        *starts, end = itertools.accumulate((-(-t.numel() // unit) * unit for t in tensors), initial=0)
    slots = [
        # Strides as the tensor's if it fills its memory, as channels_last does, else contiguous.
        Slot(index=i, start=start, numel=t.numel(), shape=t.shape, strides=torch.empty_like(t, device="meta").stride())
        for i, t, start in zip(members, tensors, starts)
    ]
    chunk_numel = -(-end // (num_chunks * unit)) * unit
    return BucketPlan(
        dtype=tensors[0].dtype,
        slots=tuple(slots),
        places=tuple((slot.shape, slot.strides, slot.start) for slot in slots),
        chunk_numel=chunk_numel,
        num_chunks=num_chunks,
        has_gaps=sum(t.numel() for t in tensors) < chunk_numel * num_chunks,
    )


def group_tensors(tensors: Sequence[Tensor], key: Callable[[Tensor], Any], limit_bytes: int) -> list[list[int]]:
    """Put tensors with equal keys together, in order; a group is closed at a size, as DDP closes buckets.

    Returns:
        The indices of each group's tensors.
    """
    groups: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for index, t in enumerate(tensors):
        members, size = filling.get(key(t), ([], 0))
        if not members or size >= limit_bytes:
            members, size = [], 0
            groups.append(members)
        members.append(index)
        filling[key(t)] = (members, size + t.nbytes)
    return groups


def group_by_storage(
    tensors: Sequence[Tensor], which: Sequence[int], limit_bytes: int
) -> Iterator[tuple[list[int], bool]]:
    """Yield the indices of tensors that can travel together, and whether they lie in one storage that is to be kept."""
    owners: dict[tuple[int, torch.dtype, bool], list[int]] = {}
    for i in which:
        t = tensors[i]
        owners.setdefault((t.untyped_storage().data_ptr(), t.dtype, t.requires_grad), []).append(i)
    together = [members for members in owners.values() if _fill_storage([tensors[i] for i in members])]
    yield from ((members, True) for members in together)
    taken = {i for members in together for i in members}
    rest = [i for i in which if i not in taken]
    for members in group_tensors([tensors[i] for i in rest], lambda t: (t.dtype, t.requires_grad), limit_bytes):
        yield [rest[k] for k in members], False


def _fill_storage(tensors: Sequence[Tensor]) -> bool:
    """Tell whether tensors lie side by side in their one storage, as the weights cuDNN wants for a recurrent layer."""
    if len(tensors) < 2:
        return False
    spans = sorted((t.storage_offset(), t.storage_offset() + t.numel()) for t in tensors)
    apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    # A few views of a large table are not worth copying the table for.
    used = sum(t.nbytes for t in tensors)
    return apart and all(t.is_contiguous() for t in tensors) and 2 * used >= tensors[0].untyped_storage().nbytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBucket:
    """Parameters of one dtype that several devices keep a copy of from one step to the next, laid out alike."""

    plan: BucketPlan
    params: Mapping[int, Tensor]
    """The parameters on the primary device, by slot."""
    flats: list[Tensor]
    """Flat memory on each device; without the primary's where parameters are not side by side there."""
    is_flat: bool
    """Whether they are side by side on the primary device."""

    def memory(self) -> list[Tensor]:
        """Return each copy's flat memory, the primary's first; made anew there if parameters aren't side by side."""
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
