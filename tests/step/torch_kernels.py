"""What ``everygpu.step.kernels`` and ``everygpu.comm.kernels`` do, written with torch: by addresses, block by block."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from everygpu.parallel.buckets.plan import BLOCK_NUMEL
from everygpu.step.device_tables import BlockRange

Rule = Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[float]], Tensor]
"""From value, gradient, states and options to the new value; the states are written."""


class Kernels:
    """In place of all these modules.

    Args:
        queue: Called with a function and the tensors to call it with, which it does at the right time.
    """

    def __init__(self, queue: Callable[..., None]) -> None:
        self._queue = queue

    def of_updates(self) -> dict[str, Callable[..., None]]:
        """Return what stands in for ``run`` of each module of ``everygpu.step.kernels``."""
        return {
            "reduce": self._run_reduce,
            **{name: functools.partial(self._run_update, RULES[name]) for name in RULES},
        }

    def _run_update(self, rule: Rule, grads: Tensor, *tables: Tensor, factor: Tensor, **numbers: Any) -> None:
        self._queue(functools.partial(_update, rule, **numbers), grads, *tables, factor)

    def _run_reduce(self, *tensors: Tensor, span: BlockRange, rank: int) -> None:
        self._queue(functools.partial(_reduce, span=span), *tensors)

    def run_send(self, *tables: Tensor, **numbers: Any) -> None:
        self._queue(functools.partial(_send, **numbers), *tables)

    def run_add(self, *tables: Tensor, **numbers: Any) -> None:
        self._queue(functools.partial(_add, **numbers), *tables)


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
    *,
    dtype: torch.dtype,
    block: int,
    begin: int,
    index: int,
    rank: int,
) -> None:
    for k, length in enumerate(lengths.tolist()):
        if length:
            found = [_at(address, length, dtype) for address in sources[:, k].tolist()]
            place = int(targets[index]) + dtype.itemsize * (begin + k * block)
            _at(place, length, dtype).copy_(sum(found))


def _reduce(
    grads: Tensor,
    targets: Tensor,
    squares: Tensor,
    rows: Tensor,
    lengths: Tensor,
    status: Tensor,
    *,
    span: BlockRange,
) -> None:
    for block in range(span.first, span.first + span.num_blocks):
        squares[block] = 0
        if rows[block] >= 0:
            total = _sum(grads, block, int(lengths[block]), span.dtype)
            _at(int(targets[0, block]), BLOCK_NUMEL, span.dtype).copy_(total)
            squares[block] = total.square().sum()
            if not total.isfinite().all():
                _note_sources(status, grads, block, int(lengths[block]), span.dtype)


def _update(
    rule: Rule,
    grads: Tensor,
    values: Tensor,
    states: Tensor,
    rows: Tensor,
    lengths: Tensor,
    table: Tensor,
    status: Tensor,
    factor: Tensor,
    *,
    span: BlockRange,
    rank: int,
) -> None:
    for block in range(span.first, span.first + span.num_blocks):
        if rows[block] < 0:
            continue
        options = table[rows[block]].tolist()
        places, kept = (
            [_at(address, BLOCK_NUMEL, span.dtype) for address in found[:, block].tolist()]
            for found in (values, states)
        )
        grad = _sum(grads, block, int(lengths[block]), span.dtype) * factor * options[0]
        is_kept = ~grad.isfinite()
        if is_kept.any():
            _note_sources(status, grads, block, int(lengths[block]), span.dtype)
        wide = [s.float().clone() for s in kept]
        before = places[rank].float()
        new = rule(before.clone(), grad, wide, options)
        for place, value in [*((p, torch.where(is_kept, before, new)) for p in places), *zip(kept, wide)]:
            place.copy_(torch.where(is_kept, place.float(), value))


def _note_sources(status: Tensor, grads: Tensor, block: int, length: int, dtype: torch.dtype) -> None:
    found = _at(int(status), grads.shape[0], torch.float32)
    for source, address in enumerate(grads[:, block].tolist()):
        if not _at(address, length, dtype).isfinite().all():
            found[source] = 1


def _sum(grads: Tensor, block: int, length: int, dtype: torch.dtype) -> Tensor:
    total = torch.zeros(BLOCK_NUMEL, dtype=torch.float32, device="cpu")
    for address in grads[:, block].tolist():
        total[:length] += _at(address, length, dtype)
    return total


def _adam(value: Tensor, grad: Tensor, states: Sequence[Tensor], options: Sequence[float]) -> Tensor:
    _, decay, l2, _, rest1, beta2, rest2, eps, step_size, inverse_root2 = options
    mean, square = states
    grad = grad + l2 * value
    mean += rest1 * (grad - mean)
    square.mul_(beta2).addcmul_(grad, grad, value=rest2)
    return value * decay - step_size * mean / (square.sqrt() * inverse_root2 + eps)


def _sgd(value: Tensor, grad: Tensor, states: Sequence[Tensor], options: Sequence[float]) -> Tensor:
    _, l2, momentum, fresh, nesterov, lr = options
    (kept,) = states
    grad = grad + l2 * value
    if momentum:
        kept.mul_(momentum).add_(grad, alpha=fresh)
        grad = nesterov * (grad + momentum * kept) + (1 - nesterov) * kept
    return value - lr * grad


RULES: dict[str, Rule] = {"adam": _adam, "sgd": _sgd}


def _at(address: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Find memory by its address, where the kernels would load it 16 bytes at a time."""
    assert address, "no address for a block that is used"
    assert address % 16 == 0, "not aligned as the kernels need it"
    if not numel:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * (numel * dtype.itemsize)).from_address(address), dtype=dtype)
