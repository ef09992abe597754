"""What ``everygpu.comm.kernels`` do, written with torch: by addresses, block by block."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from everygpu.comm import tree_sum


class Kernels:
    """In place of all these modules.

    Args:
        queue: Called with a function and the tensors to call it with, which it does at the right time.
    """

    def __init__(self, queue: Callable[..., None]) -> None:
        self._queue = queue

    def run_send(self, *tables: Tensor, **numbers: Any) -> None:
        self._queue(functools.partial(_send, **numbers), *tables)

    def run_add(
        self,
        *tables: Tensor,
        squares: Tensor | None = None,
        status: Tensor | None = None,
        found: Tensor | None = None,
        **numbers: Any,
    ) -> None:
        given = [t for t in (squares, status, found) if t is not None]

        def add(*tensors: Tensor) -> None:
            left = iter(tensors[len(tables) :])
            _add(
                *tensors[: len(tables)],
                *(None if t is None else next(left) for t in (squares, status, found)),
                **numbers,
            )

        self._queue(add, *tables, *given)


def _send(
    sources: Tensor, lengths: Tensor, targets: Tensor, *, dtype: torch.dtype, block: int, begin: int, rank: int
) -> None:
    for k, (source, length) in enumerate(zip(sources.tolist(), lengths.tolist())):
        for target in targets.tolist() if length else ():
            place = target + dtype.itemsize * (begin + k * block)
            _at(place, length, dtype).copy_(_at(source, length, dtype))


def _add(
    sources: Tensor,
    lengths: Tensor,
    targets: Tensor,
    squares: Tensor | None,
    status: Tensor | None,
    found: Tensor | None,
    *,
    dtype: torch.dtype,
    block: int,
    begin: int,
    index: int,
    rank: int,
    mark: float = 0.0,
    by_tree: bool = False,
) -> None:
    for k, length in enumerate(lengths.tolist()):
        if not length:
            continue
        parts = [_at(address, length, dtype) for address in sources[:, k].tolist()]
        total = sum(part if dtype is torch.float64 else part.float() for part in parts)
        if by_tree:
            total = tree_sum(parts, parts[0].device)
        place = int(targets[index]) + dtype.itemsize * (begin + k * block)
        _at(place, length, dtype).copy_(total)
        if squares is not None:
            squares[k] = total.square().sum()
        if found is not None and status is not None and not found[index] and not total.isfinite().all():
            found[index] = 1
            _at(int(status), 1, torch.float32).fill_(mark)


def _at(address: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Find memory by its address, where the kernels would load it 16 bytes at a time."""
    assert address, "no address for a block that is used"
    assert address % 16 == 0, "not aligned as the kernels need it"
    if not numel:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * (numel * dtype.itemsize)).from_address(address), dtype=dtype)
