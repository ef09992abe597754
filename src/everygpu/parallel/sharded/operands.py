"""What rules for a ``ShardedBatch`` are made of: shares of operands, calls per part, sums of what comes out."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everygpu import comm
from everygpu.parallel.sharded.batch import Args, Kwargs, Rule, ShardedBatch, has_parts, parts_of, whole, wrap
from everygpu.parallel.sharded.layout import ShardLayout, move, move_to_each, same_rows

Declined = Any
"""What a rule returns when the joined tensor must answer: NotImplemented."""

HALF = (torch.float16, torch.bfloat16)


class ShardSpec(NamedTuple):
    """How the batches of one call are laid out."""

    layout: ShardLayout
    from_right: int
    """The rows' dimension, counted from the right as broadcasting does."""

    def batch(self, parts: Sequence[Tensor]) -> ShardedBatch | Declined:
        """Make a batch of results that have their rows where the operands had them."""
        dim = parts[0].ndim - self.from_right
        if dim < 0 or tuple(p.shape[dim] for p in parts) != self.layout.sizes:
            return NotImplemented
        return wrap(parts, self.layout, dim)


def frame_of(*values: Any) -> ShardSpec | None:
    """Return the layout that all batches among the values share, or None."""
    frames = [
        ShardSpec(v._layout, v.ndim - v.shard_dim) for v in values if isinstance(v, ShardedBatch) and has_parts(v)
    ]
    if not frames:
        return None
    first, *others = frames
    for other in others:
        if other.from_right != first.from_right or not same_rows(other.layout, first.layout):
            return None
    weights = {f.layout.weights for f in frames} - {None}
    if len(weights) > 1:
        return None
    return next((f for f in frames if f.layout.weights is not None), first)


def spread(value: Any, frame: ShardSpec) -> Sequence[Any] | None:
    """Give every part its share of an operand, as broadcasting would pair them; None when there is no such share."""
    if isinstance(value, ShardedBatch) and has_parts(value):
        return parts_in(value, frame)
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
        return None
    if not isinstance(value, Tensor):
        return constant(value, frame.layout)
    x = whole(value) if isinstance(value, ShardedBatch) else value
    if x.ndim == 0 and x.device.type == "cpu":
        return constant(x, frame.layout)
    if x.device != frame.layout.home or x.layout != torch.strided:
        return None
    dim = x.ndim - frame.from_right
    if dim < 0 or (x.shape[dim] == 1 != frame.layout.num_rows):
        return move_to_each(x, frame.layout.devices)
    return cut(x, dim, frame.layout)


def constant(value: Any, layout: ShardLayout) -> list[Any]:
    """Give every part the same."""
    return [value] * len(layout.sizes)


def parts_in(x: ShardedBatch, frame: ShardSpec) -> Sequence[Tensor] | None:
    """Return a batch's parts if its rows are where the frame has them."""
    is_alike = x.ndim - x.shard_dim == frame.from_right and same_rows(x._layout, frame.layout)
    return parts_of(x) if is_alike else None


def cut(x: Tensor, dim: int, layout: ShardLayout) -> list[Tensor] | None:
    """Cut a plain tensor as the batch is cut; None if it is not as long."""
    if x.shape[dim] != layout.num_rows or x.device != layout.home:
        return None
    return [move(part, d) for part, d in zip(torch.split(x, list(layout.sizes), dim), layout.devices)]


def cut_alike(value: Any, frame: ShardSpec) -> Sequence[Tensor] | None:
    """Give every part its rows of an operand that must have them all: no broadcasting."""
    if isinstance(value, ShardedBatch) and has_parts(value):
        return parts_in(value, frame)
    x = whole(value) if isinstance(value, ShardedBatch) else value
    dim = x.ndim - frame.from_right
    return cut(x, dim, frame.layout) if dim >= 0 else None


def everywhere(x: Tensor, layout: ShardLayout) -> list[Tensor] | None:
    """Give every part the whole of an operand."""
    plain = whole(x) if isinstance(x, ShardedBatch) else x
    return move_to_each(plain, layout.devices) if plain.device == layout.home else None


def each(func: Any, columns: Sequence[Sequence[Any] | None], kwargs: Kwargs, layout: ShardLayout) -> list[Any] | None:
    """Call an operation once per part, with its share of every operand; None if one can't be shared out."""
    rows = [c for c in columns if c is not None]
    if len(rows) < len(columns):
        return None
    return [func(*operands, **kwargs) for operands in zip(*rows)]


def home(parts: Sequence[Tensor], layout: ShardLayout) -> list[Tensor]:
    """Move results to where the joined tensor would be."""
    return comm.copy_from_each(parts, layout.home)


def add_up(parts: Sequence[Tensor], layout: ShardLayout) -> Tensor:
    """Add results up where the joined tensor would be, in their order, in float32 at least."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in HALF else dtype
    found = home(parts, layout)
    if dtype == wide and found[0].ndim <= 1:
        return torch.stack(found).sum(0, dtype=dtype)
    return functools.reduce(torch.add, [p.to(wide) for p in found]).to(dtype)


def batches(frame: ShardSpec, parts: Sequence[Any]) -> Any:
    """Make a batch of each result; one that a device has no use for is empty, as ``log_sigmoid``'s buffer."""
    if isinstance(parts[0], Tensor):
        return frame.batch(parts)
    results = tuple(_unused(c, frame) if _is_unused(c, frame) else frame.batch(c) for c in zip(*parts))
    return NotImplemented if any(r is NotImplemented for r in results) else results


def _is_unused(parts: Sequence[Tensor], frame: ShardSpec) -> bool:
    return all(p.shape == (0,) for p in parts) and frame.layout.num_rows > 0


def _unused(parts: Sequence[Tensor], frame: ShardSpec) -> Tensor:
    return home(parts[:1], frame.layout)[0]


@functools.cache
def argument_names(func: Any) -> tuple[str, ...]:
    return tuple(a.name for a in func._schema.arguments)


def named(func: Any, args: Args, kwargs: Kwargs) -> Kwargs:
    """Name an operation's arguments."""
    return {**dict(zip(argument_names(func), args)), **kwargs}


def dims_of(dim: Any, ndim: int) -> list[int]:
    """Return the dimensions meant by an argument; all, if it is None or empty.

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


def rules_for(*families: tuple[Rule, str]) -> dict[Any, Rule]:
    """Give one rule to each of the operations that are named beside it."""
    return {operation: rule for rule, names in families for operation in operations(names)}


def operations(names: str) -> Iterator[Any]:
    """Yield torch's operations by name, ``add`` or ``add.Tensor``, as far as this torch has them."""
    for name in names.split():
        packet, _, overload = name.partition(".")
        found = getattr(torch.ops.aten, packet, None)
        for each_overload in [overload] if overload else [] if found is None else found.overloads():
            operation = getattr(found, each_overload, None)
            if operation is not None and "name" not in each_overload and _works_on_tensors(operation):
                yield operation


def _works_on_tensors(operation: Any) -> bool:
    """Tell overloads for tensors, which write nothing or, if named so, their first argument, from all others."""
    arguments = operation._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    writes = operation.overloadpacket.__name__.endswith("_")
    return any("Tensor" in str(a.type) for a in arguments) and written == ([0] if writes else [])
