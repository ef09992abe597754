"""Copies of parameters compared bit by bit, over all devices and ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from everygpu import comm
from everygpu.parallel.buckets.kept import WORD_BYTES, KeptBucket
from everygpu.parallel.buckets.plan import Slot
from everygpu.ranks.group import Group

T = TypeVar("T")

_LARGE_BYTES, _NUM_ROWS = 2**21, 61
_BLOCK_BYTES, _PART_ROWS = 1024, 2**15

_LOW = 2**32 - 1

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The elements of one parameter that aren't the same in all copies."""

    bucket: KeptBucket
    slot: Slot
    places: Tensor
    """Where they are in a copy's memory, as integers; shape (places,). An element of 16 bytes has two."""
    bits: Tensor
    """What each copy has there; shape (copies, places)."""
    right: Tensor
    """What more than half of the copies have there; shape (places,)."""
    is_decided: bool
    """Whether there is such a majority at every place."""
    copies: list[str]
    """Where each copy is."""
    num_before: int
    """Copies of ranks before this one."""

    @property
    def num_elements(self) -> int:
        """How many elements differ."""
        return self.places.numel() // _integers_per_element(self.bucket.plan.dtype)

    def is_wrong(self, copy: int) -> Tensor:
        """Tell where a copy is not as most are; shape (places,)."""
        return self.bits[copy] != self.right

    def wrong_elements(self, copy: int) -> Tensor:
        """Return which of the elements are not as in most copies; shape (elements,)."""
        integers = self.is_wrong(copy).view(-1, _integers_per_element(self.bucket.plan.dtype))
        return integers.any(1).nonzero().flatten()

    def index_of(self, element: int) -> tuple[int, ...]:
        """Return where in the parameter an element is."""
        offset = int(self.places[element * (per := _integers_per_element(self.bucket.plan.dtype))]) // per
        offset -= self.slot.start
        index = [0] * len(self.slot.shape)
        for dim in sorted(range(len(index)), key=lambda d: -self.slot.strides[d]):
            if self.slot.shape[dim] > 1:
                index[dim], offset = divmod(offset, self.slot.strides[dim])
        return tuple(index)

    def describe(self, element: int, copy: int | None = None) -> str:
        """Return an element's value and its bits, in a copy or in most of them."""
        per_element = _integers_per_element(self.bucket.plan.dtype)
        bits = (self.right if copy is None else self.bits[copy])[element * per_element :][:per_element].clone()
        value = bits.view(self.bucket.plan.dtype).item()
        return f"{value!r} (0x{bytes(bits.view(torch.uint8).tolist())[::-1].hex()})"


def find_differences(buckets: Sequence[KeptBucket], group: Group | None) -> Iterator[list[Difference]]:
    """Compare all copies: by one number for each bucket, then in full what differs.

    Args:
        buckets: The same ones on each rank.
        group: The ranks, if there are several.
    Yields:
        The parameters of a bucket that differ; the same on each rank. One bucket at a time, as that may be all of it.
    """
    buckets = [bucket for bucket in buckets if any(slot.numel for slot in bucket.plan.slots)]
    ranks = _gather(group, _digests(buckets))
    for index, bucket in enumerate(buckets):
        if len({digest for rank in ranks for digest in rank[index]}) > 1:
            yield list(_compare(bucket, group))


def mend(difference: Difference) -> None:
    """Write what most copies have to this rank's copies that have something else."""
    bucket, right = difference.bucket, difference.right
    for i, memory in enumerate(bucket.memory()):
        wrong = difference.is_wrong(difference.num_before + i)
        if wrong.any():
            places, values = (t[wrong].to(memory.device) for t in (difference.places, right))
            memory.view(_integers(memory.dtype))[places] = values
            if i == 0:
                bucket.put_back(difference.slot, memory)


def _digests(buckets: Sequence[KeptBucket]) -> list[list[int]]:
    """Return a number for each bucket's copies; waits for the devices once."""
    columns = [[_columns(memory) for memory in bucket.memory()] for bucket in buckets]
    # Those with copies on all devices first: a bucket has the same place among the columns of each copy.
    order = sorted(range(len(buckets)), key=lambda b: -len(columns[b]))
    copies = [[b for b in order if len(columns[b]) > i] for i in range(max(map(len, columns), default=0))]
    sums = [_mixed_sums([columns[b][i] for b in members]) for i, members in enumerate(copies)]
    found: list[list[int]] = [[] for _ in buckets]
    if sums:
        numbers = iter(torch.cat(comm.copy_from_each(sums, sums[0].device)).tolist())
        for members in copies:
            before = 0
            for b in members:
                until = next(numbers)
                found[b].append((until - before) % 2**64)
                before = until
    return found


def _columns(memory: Tensor) -> list[Tensor]:
    """Return memory as integers of 8 bytes; large memory added up, modulo 2**64, to 1/61 of its size.

    Any one flipped bit changes a sum. What is added up lies far apart, at a distance that is no power of 2: faults that
    flip several bits, which could cancel, have other patterns.
    """
    words, *rest = (part.flatten() for part in _split(memory, WORD_BYTES))
    if memory.nbytes < _LARGE_BYTES:
        return [words, *rest]
    length = len(words) // _NUM_ROWS
    whole = words[: _NUM_ROWS * length].view(_NUM_ROWS, length)
    return [whole.sum(0), words[_NUM_ROWS * length :].clone(), *rest]  # and no view, which would keep all of it


def _mixed_sums(columns: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the sum of all columns up to the end of each bucket's, as integers, shape (buckets,).

    Before, each is changed by a bijection of its own, so that flips of the same bit in two of them don't cancel: high
    bits have an effect on low ones, and weights are odd.
    """
    ends = torch.tensor([sum(map(len, parts)) for parts in columns], device="cpu").cumsum(0) - 1
    mixed = torch.cat([part for parts in columns for part in parts])
    mixed ^= (mixed >> 32) & _LOW
    mixed *= torch.arange(1, 2 * len(mixed), 2, device=mixed.device)
    return mixed.cumsum(0)[ends.to(mixed.device)]


def _row_sums(rows: Tensor) -> Tensor:
    """Return a number for each row of words, each changed as by ``_mixed_sums``; a part of the rows at a time."""
    weights = torch.arange(1, 2 * rows.shape[1], 2, device=rows.device)
    parts = (rows[i : i + _PART_ROWS] for i in range(0, len(rows), _PART_ROWS))
    found = [((part ^ ((part >> 32) & _LOW)) * weights).sum(1) for part in parts]
    return torch.cat(found) if found else rows.new_zeros(0)


def _split(memory: Tensor, row_bytes: int) -> list[Tensor]:
    """Return memory as words in rows, shape (rows, words), without copying it, and one more row, with zeros at the end,
    for what is left."""
    data = memory.view(torch.uint8)
    size = data.numel() // row_bytes * row_bytes
    rest = [F.pad(data[size:], (0, row_bytes + size - data.numel()))] if size < data.numel() else []
    return [part.view(torch.int64).view(-1, row_bytes // WORD_BYTES) for part in (data[:size], *rest)]


def _compare(bucket: KeptBucket, group: Group | None) -> Iterator[Difference]:
    """Compare a bucket's copies in full; yield what differs, parameter by parameter."""
    devices = _gather(group, [str(flat.device) for flat in bucket.memory()])
    bits, places = _suspect_bits(bucket, group)
    per_element = _integers_per_element(bucket.plan.dtype)
    differing = torch.unique(places[_differing(bits)] // per_element)
    own = 0 if group is None or len(devices) == 1 else group.rank
    for slot in bucket.plan.slots:
        inside = differing[(differing >= slot.start) & (differing < slot.start + slot.numel)]
        if inside.numel():
            mine = (inside[:, None] * per_element + torch.arange(per_element, device="cpu")).flatten()
            found = bits[:, torch.searchsorted(places, mine)]
            right, is_decided = _majority(found)
            yield Difference(
                bucket=bucket,
                slot=slot,
                places=mine,
                bits=found,
                right=right,
                is_decided=is_decided,
                copies=_name_copies(devices),
                num_before=sum(map(len, devices[:own])),
            )


def _majority(rows: Tensor) -> tuple[Tensor, bool]:
    """Return what more than half of the rows have, column by column, and whether there is such a thing in each."""
    right, is_decided = rows[0].clone(), torch.zeros(rows.shape[1], dtype=torch.bool, device="cpu")
    for row in rows:
        agrees = (rows == row).sum(0) * 2 > len(rows)
        right = torch.where(agrees, row, right)
        is_decided |= agrees
        if is_decided.all():
            return right, True
    return right, False


def _suspect_bits(bucket: KeptBucket, group: Group | None) -> tuple[Tensor, Tensor]:
    """Find the blocks that differ by the sum of each.

    Returns:
        What each copy has there, as integers, shape (copies, integers), and where it is in a copy, shape (integers,).
    """
    blocks = [_split(memory, _BLOCK_BYTES) for memory in bucket.memory()]
    sums = _gather(group, [torch.cat([_row_sums(part).cpu() for part in parts]) for parts in blocks])
    which = _differing(torch.stack([s for rank in sums for s in rank]))
    rows = _gather(group, [_rows(parts, which) for parts in blocks])
    bits = torch.stack([row.flatten() for rank in rows for row in rank]).view(_integers(bucket.plan.dtype))
    size = _BLOCK_BYTES // bits.element_size()
    return bits, (which[:, None] * size + torch.arange(size, device="cpu")).flatten()


def _rows(parts: Sequence[Tensor], which: Tensor) -> Tensor:
    """Copy some rows of what ``_split`` has returned to the host."""
    first, found = 0, []
    for part in parts:
        inside = which[(which >= first) & (which < first + len(part))] - first
        found.append(part[inside.to(part.device)].cpu())
        first += len(part)
    return torch.cat(found)


def _differing(rows: Tensor) -> Tensor:
    """Return the columns in which rows are not all the same."""
    return (rows != rows[0]).any(0).nonzero().flatten()


def _name_copies(devices: list[list[str]]) -> list[str]:
    """Name each copy by its place, given the devices of each rank."""
    names = [[f"replica {i} ({device})" for i, device in enumerate(row)] for row in devices]
    if len(devices) == 1:
        return names[0]
    return [f"rank {rank}, {name}" for rank, row in enumerate(names) for name in row]


def _gather(group: Group | None, value: T) -> list[T]:
    return [value] if group is None else group.gather(value)


def _integers(dtype: torch.dtype) -> torch.dtype:
    """Return the integers that a dtype's elements are seen as; two for one of 16 bytes."""
    return _INTEGERS[min(dtype.itemsize, WORD_BYTES)]


def _integers_per_element(dtype: torch.dtype) -> int:
    return max(1, dtype.itemsize // WORD_BYTES)
