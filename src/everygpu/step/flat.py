"""Parameters side by side in flat buckets, each cut into one chunk per device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everygpu.errors import OptimizerError
from everygpu.parallel.broadcast import dense_strides, group_by_storage, storage_offsets

BLOCK_NUMEL = 1024
"""Parameters begin at, and chunks are whole multiples of: what one program of an update kernel works on."""

BUCKET_BYTES = 16 * 2**20
"""Size at which a bucket is closed: large enough for full bandwidth, small enough that the last, which no backward
is left to hide, is soon done."""


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

    @property
    def numel(self) -> int:
        """Elements in the whole bucket, the gaps between parameters included."""
        return self.chunk_numel * self.num_chunks

    def pieces(self, chunk: int) -> Iterator[Piece]:
        """List what the ``chunk``-th chunk holds."""
        begin, end = chunk * self.chunk_numel, (chunk + 1) * self.chunk_numel
        for slot in self.slots:
            first, last = max(begin, slot.start), min(end, slot.start + slot.numel)
            if first < last:
                yield Piece(index=slot.index, start=first - begin, offset=first - slot.start, numel=last - first)
            elif slot.numel == 0 and chunk == 0:  # optimizers keep a state for it all the same
                yield Piece(index=slot.index, start=0, offset=0, numel=0)


def plan_buckets(params: Sequence[Tensor], num_chunks: int, limit_bytes: int = BUCKET_BYTES) -> list[BucketPlan]:
    """Lay parameters out in buckets.

    Args:
        params: Strided; of any dtypes and shapes. Those that lie side by side in one storage, as a recurrent
            layer's weights, stay so.
        num_chunks: Devices that share the work.
        limit_bytes: Size at which a bucket is closed; a larger parameter has one of its own.
    Returns:
        Buckets in the order in which backward usually finishes them: the last parameters first.
    Raises:
        OptimizerError: two elements share memory, which in the buckets they wouldn't.
    """
    _check_memory(params)
    backwards = range(len(params))[::-1]
    return [
        _plan_bucket(params, members, num_chunks, together)
        for members, together in group_by_storage(params, backwards, limit_bytes)
    ]


def _check_memory(params: Sequence[Tensor]) -> None:
    spans = sorted((p.data_ptr(), p.data_ptr() + _extent_bytes(p), i) for i, p in enumerate(params) if p.data_ptr())
    end = 0
    together: list[int] = []
    for begin, until, i in spans:
        together = [*together, i] if begin < end else [i]
        end = max(end, until)
        addresses = torch.cat([_addresses(params[k]) for k in together]) if len(together) > 1 else None
        spread = any(size > 1 and step == 0 for size, step in zip(params[i].shape, params[i].stride()))
        if spread or (addresses is not None and torch.unique(addresses).numel() < addresses.numel()):
            raise OptimizerError(
                f"TrainStep, ShardedOptimizer: parameters must have memory of their own, got parameter {i} of shape "
                f"{tuple(params[i].shape)}, which shares some. To tie weights, use one Parameter in both places."
            )


def _extent_bytes(p: Tensor) -> int:
    return (sum((size - 1) * step for size, step in zip(p.shape, p.stride())) + 1) * p.element_size()


def _addresses(p: Tensor) -> Tensor:
    """List where each element is."""
    found = torch.tensor([p.data_ptr()])
    for size, step in zip(p.shape, p.stride()):
        found = (found[:, None] + torch.arange(size) * (step * p.element_size())).flatten()
    return found


def _plan_bucket(params: Sequence[Tensor], members: Sequence[int], num_chunks: int, together: bool) -> BucketPlan:
    tensors = [params[i] for i in members]
    starts, end = storage_offsets(tensors) if together else _block_offsets(tensors)
    slots = [
        Slot(index=i, start=start, numel=t.numel(), shape=t.shape, strides=dense_strides(t))
        for i, t, start in zip(members, tensors, starts)
    ]
    blocks = -(-end // (num_chunks * BLOCK_NUMEL))
    return BucketPlan(
        dtype=tensors[0].dtype, slots=tuple(slots), chunk_numel=blocks * BLOCK_NUMEL, num_chunks=num_chunks
    )


def _block_offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for t in tensors:
        offsets.append(end)
        end += -(-t.numel() // BLOCK_NUMEL) * BLOCK_NUMEL
    return offsets, end
