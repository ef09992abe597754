"""Views and copies that leave every row on its device."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from everygpu import comm
from everygpu.parallel.sharded.batch import ShardedBatch, has_parts, parts_of, wrap, wrap_view
from everygpu.parallel.sharded.dispatch import Args, Kwargs, Rule, named, rules_for
from everygpu.parallel.sharded.layout import ShardLayout, layout_of

KEEP = torch.preserve_format

View = tuple[int, ShardLayout, Sequence[Any]]
"""The dimension of a view's rows, their layout, and the view of each part."""


def view_rule(view_parts: Callable[[Any, ShardedBatch, Kwargs], View | None]) -> Rule:
    """Make a rule for an operation that returns one view of its first argument, or several."""

    def rule(func: Any, args: Args, kwargs: Kwargs) -> Any:
        x = args[0]
        if not isinstance(x, ShardedBatch) or not has_parts(x):
            return NotImplemented
        # torch's own check that the joined tensor has such a view.
        like = func(_meta_like(x), *args[1:], **kwargs)
        # Once the joined tensor is current, only the shapes of the parts are.
        seen = view_parts(func, x, named(func, args, kwargs))
        if seen is None:
            return NotImplemented
        dim, layout, parts = seen
        again = functools.partial(_apply, func, args[1:], kwargs)
        if isinstance(like, Tensor):
            return wrap_view(x, _place(x, like), parts, layout, dim, again)
        return [
            wrap_view(x, _place(x, one), column, layout, dim, functools.partial(_pick, again, i))
            for i, (one, column) in enumerate(zip(like, zip(*parts)))
        ]

    return rule


def _place(x: ShardedBatch, like: Tensor) -> tuple[Sequence[int], Sequence[int], int]:
    return like.shape, like.stride(), int(x.storage_offset() + like.storage_offset())


def _alias(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``alias`` and ``detach``, which autograd calls for most of what it saves."""
    (x,) = args
    if not isinstance(x, ShardedBatch) or not has_parts(x):
        return NotImplemented
    return wrap_view(x, (x.shape, x.stride(), int(x.storage_offset())), x._parts, x._layout, x.shard_dim, func)


def _apply(func: Any, args: Args, kwargs: Kwargs, x: Tensor) -> Any:
    return func(x, *args, **kwargs)


def _pick(view: Callable[[Tensor], Any], index: int, x: Tensor) -> Any:
    return view(x)[index]


def _meta_like(x: ShardedBatch) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _permuted(func: Any, x: ShardedBatch, call: Kwargs) -> View | None:
    rest = {k: v for k, v in call.items() if k != "self"}
    # Find the rows' new dimension by the same call on a tensor whose dimensions differ in size.
    marker = torch.empty([2 + d for d in range(x.ndim)], device="meta")
    dim = list(func(marker, **rest).shape).index(2 + x.shard_dim)
    return dim, x._layout, [func(p, **rest) for p in x._parts]


def _unsqueezed(func: Any, x: ShardedBatch, call: Kwargs) -> View | None:
    at = call["dim"] % (x.ndim + 1)
    return x.shard_dim + (at <= x.shard_dim), x._layout, [p.unsqueeze(at) for p in x._parts]


def _squeezed(func: Any, x: ShardedBatch, call: Kwargs) -> View | None:
    asked = call.get("dim", tuple(range(x.ndim)))
    dims = [d % x.ndim for d in (asked if isinstance(asked, (tuple, list)) else [asked])]
    gone = [d for d in dims if x.shape[d] == 1]
    if x.shard_dim in gone:
        return None
    # A part with one row keeps its rows' dimension, if the whole does.
    return x.shard_dim - sum(d < x.shard_dim for d in gone), x._layout, [p.squeeze(gone) for p in x._parts]


def _selected(func: Any, x: ShardedBatch, call: Kwargs) -> View | None:
    at = call["dim"] % x.ndim
    if at == x.shard_dim:
        return None
    return x.shard_dim - (at < x.shard_dim), x._layout, [p.select(at, call["index"]) for p in x._parts]


def _sliced(func: Any, x: ShardedBatch, call: Kwargs) -> View | None:
    at = call.get("dim", 0) % x.ndim
    rest = [call.get("start"), call.get("end"), call.get("step", 1)]
    if at == x.shard_dim:
        is_all = range(x.shape[at])[slice(*rest)] == range(x.shape[at])
        return (at, x._layout, [func(p, at) for p in x._parts]) if is_all else None
    return x.shard_dim, x._layout, [func(p, at, *rest) for p in x._parts]


def _expanded(func: Any, x: ShardedBatch, call: Kwargs) -> View | None:
    size = list(call["size"])
    dim = x.shard_dim + len(size) - x.ndim
    if size[dim] not in (-1, x.shape[x.shard_dim]):
        return None
    parts = [p.expand([*size[:dim], p.shape[x.shard_dim], *size[dim + 1 :]]) for p in x._parts]
    return dim, x._layout, parts


def _divided(func: Any, x: ShardedBatch, call: Kwargs) -> View | None:
    """``split`` and ``unbind`` along another dimension than the rows'."""
    at = call.get("dim", 0) % x.ndim
    if at == x.shard_dim:
        return None
    rest = {k: v for k, v in call.items() if k != "self"}
    gone = func == torch.ops.aten.unbind.int and at < x.shard_dim
    return x.shard_dim - gone, x._layout, [func(p, **rest) for p in x._parts]


def _reshaped(func: Any, x: ShardedBatch, call: Kwargs) -> View | None:
    """``view`` with whole rows on one dimension: ``view(-1, classes)`` merges, ``view(rows, steps, -1)`` splits."""
    shape = _whole_shape(call["size"], x.numel())
    row = None if shape is None else _row_dimension(x, shape)
    if shape is None or row is None:
        return None
    # Elements of one index of the new dimension, and of the old one.
    unit, old = math.prod(shape[row + 1 :]), math.prod(x.shape[x.shard_dim + 1 :])
    if any(n * old % unit for n in x._layout.sizes):
        return None
    sizes = tuple(n * old // unit for n in x._layout.sizes)
    layout = x._layout if sizes == x._layout.sizes else replace(x._layout, sizes=sizes)
    if layout is not x._layout and layout.weights is not None:
        return None
    parts = [p.reshape([*shape[:row], n, *shape[row + 1 :]]) for p, n in zip(x._parts, sizes)]
    return row, layout, parts


def _whole_shape(size: Sequence[int], numel: int) -> list[int] | None:
    known = math.prod(n for n in size if n != -1)
    return None if not numel else [numel // known if n == -1 else n for n in size]


def _row_dimension(x: ShardedBatch, shape: Sequence[int]) -> int | None:
    """Return the new dimension that begins where the rows' did: as many elements are in front of it."""
    front = math.prod(x.shape[: x.shard_dim])
    starts = [d for d in range(len(shape)) if math.prod(shape[:d]) == front]
    exact = [d for d in starts if shape[d] == x.shape[x.shard_dim]]
    return next(iter(exact or [d for d in starts if shape[d] > 1]), None)


# Copies.


def _copied(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``clone`` and conversions of the dtype; a copy to another device takes the rows there directly."""
    x, call = args[0], _ordinary_call(func, args, kwargs)
    if call is None:
        return NotImplemented
    device = call.get("device") or x._layout.home
    if device != x._layout.home:
        return _sent(x, device, call)
    rest = {k: v for k, v in call.items() if k in ("dtype", "memory_format")}
    return wrap([func(p, **rest) for p in parts_of(x)], x._layout, x.shard_dim)


def _ordinary_call(func: Any, args: Args, kwargs: Kwargs) -> Kwargs | None:
    """Return the arguments by name if the call makes a strided, pageable tensor of a batch with parts, else None."""
    if not isinstance(args[0], ShardedBatch) or not has_parts(args[0]):
        return None
    call = named(func, args, kwargs)
    return None if call.get("layout") not in (None, torch.strided) or call.get("pin_memory") else call


def _sent(x: ShardedBatch, device: torch.device, call: Kwargs) -> Any:
    if x._layout.weights is not None:
        layout = layout_of(device, [device] * len(x._layout.sizes), x._layout.sizes, x._layout.weights)
        return wrap([comm.copy(p.to(call.get("dtype") or p.dtype), device) for p in parts_of(x)], layout, x.shard_dim)
    if x._joined.tensor is not None or not x.is_contiguous() or call.get("memory_format", KEEP) not in (None, KEEP):
        return NotImplemented
    parts = [p.to(call.get("dtype") or p.dtype) for p in x._parts]
    return torch.cat([comm.copy(p, device).contiguous() for p in parts], x.shard_dim)


def _made_alike(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``zeros_like`` and others, which need only the shape."""
    x, call = args[0], _ordinary_call(func, args, kwargs)
    if call is None:
        return NotImplemented
    asked = call.get("device")
    is_home = asked is None or asked == x._layout.home
    if is_home and list(call.get("size", x.shape)) == list(x.shape) and not _is_empty(func):
        return _alike_by_part(func, x, call)
    return func(_meta_like(x), *args[1:], **{**kwargs, "device": asked or x._layout.home})


def _is_empty(func: Any) -> bool:
    return "empty" in str(func)


def _alike_by_part(func: Any, x: ShardedBatch, call: Kwargs) -> ShardedBatch:
    rest = {k: v for k, v in call.items() if k in ("dtype", "memory_format", "fill_value")}
    sizes = [{"size": p.shape} if "size" in call else {} for p in x._parts]
    return wrap([func(p, **size, **rest) for p, size in zip(x._parts, sizes)], x._layout, x.shard_dim)


VIEWS: dict[Any, Rule] = rules_for(
    (_alias, "alias detach"),
    (view_rule(_permuted), "transpose.int t permute"),
    (view_rule(_unsqueezed), "unsqueeze"),
    (view_rule(_squeezed), "squeeze.default squeeze.dim squeeze.dims"),
    (view_rule(_selected), "select.int"),
    (view_rule(_sliced), "slice.Tensor"),
    (view_rule(_expanded), "expand"),
    (view_rule(_divided), "split.Tensor split_with_sizes.default unbind.int"),
    (view_rule(_reshaped), "view.default _unsafe_view"),
    (_copied, "clone _to_copy"),
    (_made_alike, "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"),
)
