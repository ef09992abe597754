"""Building blocks of rules: operands split like the batch, one call per part, results summed or wrapped."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everygpu import comm
from everygpu.parallel.sharded.batch import ShardedBatch, has_parts, joined_values, parts_of, wrap
from everygpu.parallel.sharded.dispatch import Kwargs
from everygpu.parallel.sharded.layout import ShardLayout, move, move_to_each, same_rows, split

Declined = Any
"""NotImplemented, which a rule returns to run on the joined tensor instead."""

HALF = (torch.float16, torch.bfloat16)


class ShardSpec(NamedTuple):
    """How the batches of one call are laid out."""

    layout: ShardLayout
    from_right: int
    """The rows' dimension, counted from the right as broadcasting does."""

    def batch(self, parts: Sequence[Tensor]) -> ShardedBatch | Declined:
        """Wrap results whose rows are on the operands' dimension; NotImplemented for all others."""
        dim = parts[0].ndim - self.from_right
        if dim < 0 or tuple([p.shape[dim] for p in parts]) != self.layout.sizes:
            return NotImplemented
        return wrap(parts, self.layout, dim)


def shared_spec(*values: Any) -> ShardSpec | None:
    """Return the layout that all batches among the values share, or None."""
    found: ShardSpec | None = None
    for v in values:
        if not isinstance(v, ShardedBatch) or not has_parts(v):
            continue
        layout, from_right = v._layout, v.ndim - v.shard_dim
        if found is None:
            found = ShardSpec(layout, from_right)
        elif from_right != found.from_right or not same_rows(layout, found.layout):
            return None
        elif layout.weights is not None and layout.weights != found.layout.weights:
            if found.layout.weights is not None:
                return None
            found = ShardSpec(layout, from_right)
    return found


def shard_operand(value: Any, spec: ShardSpec) -> Sequence[Any] | None:
    """Split an operand into one per part as broadcasting pairs their rows; None when it can't be split."""
    if isinstance(value, ShardedBatch) and has_parts(value):
        return parts_matching(value, spec)
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
        return None
    if not isinstance(value, Tensor):
        return constant(value, spec.layout)
    x = joined_values(value) if isinstance(value, ShardedBatch) else value
    if x.ndim == 0 and x.device.type == "cpu":
        return constant(x, spec.layout)
    if not _is_movable(x, spec.layout):
        return None
    dim = x.ndim - spec.from_right
    if dim < 0 or (x.shape[dim] == 1 != spec.layout.num_rows):
        return move_to_each(x, spec.layout.devices)
    return split_rows(x, dim, spec.layout)


def constant(value: Any, layout: ShardLayout) -> list[Any]:
    """Repeat a value for every part."""
    return [value] * len(layout.sizes)


def parts_matching(x: ShardedBatch, spec: ShardSpec) -> Sequence[Tensor] | None:
    """Return a batch's parts if it is laid out as the spec says, else None."""
    is_alike = x.ndim - x.shard_dim == spec.from_right and same_rows(x._layout, spec.layout)
    return parts_of(x) if is_alike else None


def split_rows(x: Tensor, dim: int, layout: ShardLayout) -> list[Tensor] | None:
    """Split a plain tensor as the batch is split; None if it has other rows or is elsewhere."""
    if x.shape[dim] != layout.num_rows or not _is_movable(x, layout):
        return None
    return [move(part, d) for part, d in zip(split(x, layout, dim), layout.devices)]


def shard_rows(value: Any, spec: ShardSpec) -> Sequence[Tensor] | None:
    """Split an operand that has all rows, without broadcasting; None when it can't be split."""
    if isinstance(value, ShardedBatch) and has_parts(value):
        return parts_matching(value, spec)
    x = joined_values(value) if isinstance(value, ShardedBatch) else value
    dim = x.ndim - spec.from_right
    return split_rows(x, dim, spec.layout) if dim >= 0 else None


def replicate_operand(x: Tensor, layout: ShardLayout) -> list[Tensor] | None:
    """Copy an operand whole to every part's device; None if it is sparse or elsewhere."""
    plain = joined_values(x) if isinstance(x, ShardedBatch) else x
    return move_to_each(plain, layout.devices) if _is_movable(plain, layout) else None


def _is_movable(x: Tensor, layout: ShardLayout) -> bool:
    return x.device == layout.home and x.layout == torch.strided


def call_on_parts(
    func: Any, columns: Sequence[Sequence[Any] | None], kwargs: Kwargs, layout: ShardLayout
) -> list[Any] | None:
    """Call an operation once per part, with one entry of each column; None if a column is None, or the call fails."""
    rows = [c for c in columns if c is not None]
    if len(rows) < len(columns):
        return None
    try:
        return [func(*operands, **kwargs) for operands in zip(*rows)]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError):
        return None  # The call on the joined tensor fails, too, with a message about its shape.


def move_home(parts: Sequence[Tensor], layout: ShardLayout) -> list[Tensor]:
    """Copy results to the device of the batch."""
    if all(p.device == layout.home for p in parts):
        return list(parts)
    return comm.copy_from_each(parts, layout.home)


def sum_parts(parts: Sequence[Tensor], layout: ShardLayout) -> Tensor:
    """Sum results on the device of the batch, in their order, in float32 at least."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in HALF else dtype
    found = move_home(parts, layout)
    if dtype == wide and found[0].ndim <= 1:
        return torch.stack(found).sum(0, dtype=dtype)
    return functools.reduce(torch.add, [p.to(wide) for p in found]).to(dtype)


def wrap_results(spec: ShardSpec, parts: Sequence[Any]) -> Any:
    """Wrap an operation's results, one or several; one that is empty on a device, as ``log_sigmoid``'s, stays plain."""
    if isinstance(parts[0], Tensor):
        return spec.batch(parts)
    results = tuple(_move_unused(c, spec) if _is_unused(c, spec) else spec.batch(c) for c in zip(*parts))
    return NotImplemented if any(r is NotImplemented for r in results) else results


def _is_unused(parts: Sequence[Tensor], spec: ShardSpec) -> bool:
    return all(p.shape == (0,) for p in parts) and spec.layout.num_rows > 0


def _move_unused(parts: Sequence[Tensor], spec: ShardSpec) -> Tensor:
    return move_home(parts[:1], spec.layout)[0]


def dims_of(dim: Any, ndim: int) -> list[int]:
    """Return the dimensions that a ``dim`` argument names; all, if it is None or empty.

    Raises:
        IndexError: as torch raises it.
    """
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(ndim))
    dims = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    for d in dims:
        if not -ndim <= d < ndim:
            raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {d})")
    return [d % ndim for d in dims]
