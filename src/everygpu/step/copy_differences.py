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

_BLOCK_BYTES = 1024

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
    copies: list[str]
    """Where each copy is."""
    num_before: int
    """Copies of ranks before this one."""

    @property
    def right(self) -> Tensor:
        """What most copies have; shape (places,)."""
        return self.bits.mode(0).values

    @property
    def is_decided(self) -> bool:
        """Whether more than half of the copies agree at every place."""
        return bool(((self.bits == self.right).sum(0) * 2 > len(self.bits)).all())

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


def find_differences(buckets: Sequence[KeptBucket], group: Group | None) -> list[Difference]:
    """Compare all copies: by one number for each bucket, and only what differs then in full.

    Args:
        buckets: The same ones on each rank.
        group: The ranks, if there are several.
    Returns:
        The same on each rank, by parameter.
    """
    ranks = _gather(group, _digests(buckets))
    found: list[Difference] = []
    for index, bucket in enumerate(buckets):
        if len({digest for rank in ranks for digest in rank[index]}) > 1:
            found += _compare(bucket, group)
    return found


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
    sums = [[_digest(memory) for memory in bucket.memory()] for bucket in buckets]
    flat = [s for row in sums for s in row]
    if not flat:
        return []
    devices = list(dict.fromkeys(s.device for s in flat))
    of_devices = [[i for i, s in enumerate(flat) if s.device == d] for d in devices]
    # One copy from each device, and one to the host.
    together = comm.copy_from_each([torch.stack([flat[i] for i in members]) for members in of_devices], devices[0])
    order = [i for members in of_devices for i in members]
    numbers = iter([n for _, n in sorted(zip(order, torch.cat(together).tolist()))])
    return [[next(numbers) for _ in row] for row in sums]


def _digest(memory: Tensor) -> Tensor:
    """Return a number of memory's bits, shape (): the sum of its words as integers, modulo 2**64.

    Any one flipped bit changes it, also that of a nan or of the sign of zero. Weights by position would find two flips
    that cancel, which takes the same bit of two words in one bucket in opposite directions; they would cost as much
    memory as a bucket.
    """
    return torch.stack([words.sum() for words in _split(memory, WORD_BYTES)]).sum()


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
            yield Difference(
                bucket=bucket,
                slot=slot,
                places=mine,
                bits=bits[:, torch.searchsorted(places, mine)],
                copies=_name_copies(devices),
                num_before=sum(map(len, devices[:own])),
            )


def _suspect_bits(bucket: KeptBucket, group: Group | None) -> tuple[Tensor, Tensor]:
    """Find the blocks that differ by the sum of each.

    Returns:
        What each copy has there, as integers, shape (copies, integers), and where it is in a copy, shape (integers,).
    """
    blocks = [_split(memory, _BLOCK_BYTES) for memory in bucket.memory()]
    sums = _gather(group, [torch.cat([part.sum(1).cpu() for part in parts]) for parts in blocks])
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
