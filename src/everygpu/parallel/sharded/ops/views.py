"""Views and copies that leave every row on its device."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everygpu import comm
from everygpu.parallel.sharded.batch import ShardedBatch, has_parts, parts_of, was_joined, wrap, wrap_view
from everygpu.parallel.sharded.dispatch import Args, Kwargs, Rule, named, rules_for
from everygpu.parallel.sharded.layout import layout_of

KEEP = torch.preserve_format

Cut = tuple[tuple[int, ...], int, tuple[int, ...]]
"""A batch's shape, the dimension of its rows, and the rows of each part."""


class PartViews(NamedTuple):
    """The view of each part."""

    dim: int
    """The dimension of the view's rows."""
    sizes: tuple[int, ...]
    """Rows of each part of the view."""
    func: Any
    """The operation on a part."""
    args: Sequence[Args]
    """Its further arguments, for each part."""


def view_rule(view_parts: Callable[[Any, Cut, Args, Kwargs], PartViews | None]) -> Rule:
    """Make a rule for an operation that returns one view of its first argument, or several."""

    # What is asked for depends on shapes alone, and computing it takes longer than the views.
    @functools.lru_cache(maxsize=2048)
    def plan(func: Any, cut: Cut, strides: tuple[int, ...], rest: Args, named_rest: Args) -> Any:
        given = [list(a) if isinstance(a, tuple) else a for a in rest]
        kwargs = dict(named_rest)
        # torch's own check that the joined tensor has such a view.
        like = func(torch.empty_strided(cut[0], strides, device="meta"), *given, **kwargs)
        places = [(t.shape, t.stride(), t.storage_offset()) for t in ([like] if isinstance(like, Tensor) else like)]
        call = named(func, (None, *given), kwargs)
        return isinstance(like, Tensor), places, view_parts(func, cut, tuple(given), call)

    def rule(func: Any, args: Args, kwargs: Kwargs) -> Any:
        x = args[0]
        if not isinstance(x, ShardedBatch) or not has_parts(x):
            return NotImplemented
        rest = tuple([tuple(a) if isinstance(a, list) else a for a in args[1:]])
        layout = x._layout
        is_one, places, views = plan(
            func, (tuple(x.shape), x.shard_dim, layout.sizes), x.stride(), rest, tuple(kwargs.items())
        )
        if views is None or (views.sizes != layout.sizes and layout.weights is not None):
            return NotImplemented
        if views.sizes != layout.sizes:
            layout = replace(layout, sizes=views.sizes)
        # Once the joined tensor is current, only the shapes of the parts are.
        parts = [views.func(p, *more) for p, more in zip(x._parts, views.args)]
        again = functools.partial(_apply, func, args[1:], kwargs)
        if is_one:
            return wrap_view(x, places[0], parts, layout, views.dim, again)
        return [
            wrap_view(x, place, column, layout, views.dim, functools.partial(_pick, again, i))
            for i, (place, column) in enumerate(zip(places, zip(*parts)))
        ]

    return rule


def _apply(func: Any, args: Args, kwargs: Kwargs, x: Tensor) -> Any:
    return func(x, *args, **kwargs)


def _pick(view: Callable[[Tensor], Any], index: int, x: Tensor) -> Any:
    return view(x)[index]


def _meta_like(x: ShardedBatch) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _alias(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``alias`` and ``detach``, which autograd calls for most of what it saves."""
    (x,) = args
    if not isinstance(x, ShardedBatch) or not has_parts(x):
        return NotImplemented
    return wrap_view(x, (x.shape, x.stride(), 0), x._parts, x._layout, x.shard_dim, func)


def _permuted(func: Any, cut: Cut, rest: Args, call: Kwargs) -> PartViews | None:
    shape, row, sizes = cut
    # Find the rows' new dimension by the same call on a tensor whose dimensions differ in size.
    marker = torch.empty([2 + d for d in range(len(shape))], device="meta")
    return PartViews(list(func(marker, *rest).shape).index(2 + row), sizes, func, [rest] * len(sizes))


def _unsqueezed(func: Any, cut: Cut, rest: Args, call: Kwargs) -> PartViews | None:
    shape, row, sizes = cut
    return PartViews(row + (call["dim"] % (len(shape) + 1) <= row), sizes, func, [rest] * len(sizes))


def _squeezed(func: Any, cut: Cut, rest: Args, call: Kwargs) -> PartViews | None:
    shape, row, sizes = cut
    asked = call.get("dim", tuple(range(len(shape))))
    dims = [d % len(shape) for d in (asked if isinstance(asked, (tuple, list)) else [asked])]
    gone = [d for d in dims if shape[d] == 1]
    if row in gone:
        return None
    # A part with one row keeps its rows' dimension, if the whole does.
    return PartViews(row - sum(d < row for d in gone), sizes, torch.squeeze, [(gone,)] * len(sizes))


def _selected(func: Any, cut: Cut, rest: Args, call: Kwargs) -> PartViews | None:
    shape, row, sizes = cut
    at = call["dim"] % len(shape)
    return None if at == row else PartViews(row - (at < row), sizes, func, [rest] * len(sizes))


def _sliced(func: Any, cut: Cut, rest: Args, call: Kwargs) -> PartViews | None:
    shape, row, sizes = cut
    at = call.get("dim", 0) % len(shape)
    taken = [call.get("start"), call.get("end"), call.get("step", 1)]
    if at != row:
        return PartViews(row, sizes, func, [(at, *taken)] * len(sizes))
    is_all = range(shape[at])[slice(*taken)] == range(shape[at])
    return PartViews(row, sizes, func, [(at,)] * len(sizes)) if is_all else None


def _expanded(func: Any, cut: Cut, rest: Args, call: Kwargs) -> PartViews | None:
    shape, row, sizes = cut
    size = list(call["size"])
    dim = row + len(size) - len(shape)
    if size[dim] not in (-1, shape[row]):
        return None
    return PartViews(dim, sizes, func, [([*size[:dim], n, *size[dim + 1 :]],) for n in sizes])


def _divided(func: Any, cut: Cut, rest: Args, call: Kwargs) -> PartViews | None:
    """``split`` and ``unbind`` along another dimension than the rows'."""
    shape, row, sizes = cut
    at = call.get("dim", 0) % len(shape)
    gone = func == torch.ops.aten.unbind.int and at < row
    return None if at == row else PartViews(row - gone, sizes, func, [rest] * len(sizes))


def _reshaped(func: Any, cut: Cut, rest: Args, call: Kwargs) -> PartViews | None:
    """``view`` with whole rows on one dimension: ``view(-1, classes)`` merges, ``view(rows, steps, -1)`` splits."""
    shape, row, sizes = cut
    new = _whole_shape(call["size"], math.prod(shape))
    at = None if new is None else _row_dimension(shape, row, new)
    if new is None or at is None:
        return None
    # Elements of one index of the new dimension, and of the old one.
    unit, old = math.prod(new[at + 1 :]), math.prod(shape[row + 1 :])
    if any(n * old % unit for n in sizes):
        return None
    counts = tuple(n * old // unit for n in sizes)
    return PartViews(at, counts, torch.reshape, [([*new[:at], n, *new[at + 1 :]],) for n in counts])


def _whole_shape(size: Sequence[int], numel: int) -> list[int] | None:
    known = math.prod(n for n in size if n != -1)
    return None if not numel else [numel // known if n == -1 else n for n in size]


def _row_dimension(shape: Sequence[int], row: int, new: Sequence[int]) -> int | None:
    """Return the new dimension that begins where the rows' did: as many elements are in front of it."""
    front = math.prod(shape[:row])
    starts = [d for d in range(len(new)) if math.prod(new[:d]) == front]
    exact = [d for d in starts if new[d] == shape[row]]
    return next(iter(exact or [d for d in starts if new[d] > 1]), None)


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
    if was_joined(x) or not x.is_contiguous() or call.get("memory_format", KEEP) not in (None, KEEP):
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
