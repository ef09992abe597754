"""Views and copies that leave every row on its device."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everygpu import comm
from everygpu.parallel.sharded.batch import ShardedBatch, has_parts, parts_of, was_joined, wrap, wrap_view
from everygpu.parallel.sharded.dispatch import Args, Declined, Kwargs, Rule, named, operations, rules_for
from everygpu.parallel.sharded.layout import layout_of
from everygpu.parallel.sharded.rules import call_on_parts, constant, shard_rows, spec_of

KEEP = torch.preserve_format
Place = tuple[Sequence[int], Sequence[int], Any]
"""A view's shape, strides and offset."""


class _PartViews(NamedTuple):
    """The same view, or views, of the whole and of each part."""

    places: list[Place]
    """Of each view of the whole."""
    dim: int
    """The dimension of the views' rows."""
    sizes: tuple[int, ...]
    """Rows of each part of a view."""
    func: Any
    """The operation on a part."""
    args: Sequence[Args]
    """Its further arguments, for each part."""


def view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Operations that return one view of their first argument, or several, without splitting rows."""
    x = args[0]
    if not isinstance(x, ShardedBatch) or not has_parts(x):
        raise Declined
    layout = x._layout
    rest = tuple([tuple(a) if isinstance(a, list) else a for a in args[1:]])
    shape = tuple(x.shape)
    plan = _plan(func, shape, x.stride(), x.shard_dim, layout.sizes, rest, tuple(kwargs.items()))
    if plan is None or (plan.sizes != layout.sizes and layout.weights is not None):
        raise Declined
    if plan.sizes != layout.sizes:
        layout = replace(layout, sizes=plan.sizes)
    # Once the joined tensor is current, only the shapes of the parts are.
    parts = [plan.func(p, *more) for p, more in zip(x._parts, plan.args)]
    others = args[1:]  # a view holds no base, whose graph may hold the view

    def again(t: Tensor) -> Any:
        return func(t, *others, **kwargs)

    if isinstance(parts[0], Tensor):
        return wrap_view(x, plan.places[0], parts, layout, plan.dim, again)
    return [
        wrap_view(x, place, column, layout, plan.dim, lambda t, i=i: again(t)[i])  # type: ignore[misc]
        for i, (place, column) in enumerate(zip(plan.places, zip(*parts)))
    ]


@functools.lru_cache(maxsize=2048)
def _plan(
    func: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    row: int,
    sizes: tuple[int, ...],
    rest: Args,
    named_rest: Args,
) -> _PartViews | None:
    """Return the call for each part; None if a view splits rows. It depends on shapes alone, and takes longer."""
    given, kwargs = [list(a) if isinstance(a, tuple) else a for a in rest], dict(named_rest)
    # torch's own check that the joined tensor has such a view.
    like = func(torch.empty_strided(shape, strides, device="meta"), *given, **kwargs)
    likes = [like] if isinstance(like, Tensor) else like
    places: list[Place] = [(t.shape, t.stride(), t.storage_offset()) for t in likes]
    call = named(func, (None, *given), kwargs)
    if func in _RESHAPING:
        return _reshaped(places, shape, row, sizes)
    if func in _EXPANDING:
        dim = row + len(call["size"]) - len(shape)
        asked = [-1 if d == dim and n == shape[row] else n for d, n in enumerate(call["size"])]
        return _PartViews(places, dim, sizes, func, [(asked,)] * len(sizes)) if asked[dim] == -1 else None
    if func in _SQUEEZING:  # a part with one row keeps its rows' dimension, if the whole does
        dims = call.get("dim", range(len(shape)))
        dims = [d % len(shape) for d in ([dims] if isinstance(dims, int) else dims)]
        func, given, kwargs = torch.ops.aten.squeeze.dims, [[d for d in dims if shape[d] == 1]], {}
        if row in given[0]:
            return None
    found = _dimension_of_rows(func, shape, row, given, kwargs)
    part = functools.partial(func, **kwargs) if kwargs else func
    return None if found is None else _PartViews(places, found, sizes, part, [tuple(given)] * len(sizes))


def _dimension_of_rows(func: Any, shape: Sequence[int], row: int, given: list[Any], kwargs: Kwargs) -> int | None:
    """Return the dimension of views that has all rows, however many there are; None if no dimension has."""
    found = []
    for more in (0, 1, 2):
        x = torch.empty([n + more * (d == row) for d, n in enumerate(shape)], device="meta")
        try:
            like = func(x, *given, **kwargs)
        except RuntimeError:  # sizes that only sum up for these rows
            return None
        found.append([list(t.shape) for t in ([like] if isinstance(like, Tensor) else like)])

    def has_rows(d: int) -> bool:
        return all(
            shapes == [[*s[:d], shape[row] + more, *s[d + 1 :]] for s in found[0]] for more, shapes in enumerate(found)
        )

    return next((d for d in range(len(found[0][0]) if found[0] else 0) if has_rows(d)), None)


def _reshaped(places: list[Place], shape: Sequence[int], row: int, sizes: Sequence[int]) -> _PartViews | None:
    """``view`` with whole rows on one dimension: ``view(-1, classes)`` merges, ``view(rows, steps, -1)`` splits."""
    new, front, old = list(places[0][0]), math.prod(shape[:row]), math.prod(shape[row + 1 :])
    # The new dimension that begins where the rows' did: as many elements are in front of it.
    starts = [d for d in range(len(new)) if math.prod(new[:d]) == front]
    at = next(iter([d for d in starts if new[d] == shape[row]] or [d for d in starts if new[d] > 1]), None)
    if at is None or not math.prod(new):
        return None
    unit = math.prod(new[at + 1 :])  # elements of one index of the new dimension
    if any(n * old % unit for n in sizes):
        return None
    counts = tuple(n * old // unit for n in sizes)
    return _PartViews(places, at, counts, torch.reshape, [([*new[:at], n, *new[at + 1 :]],) for n in counts])


_RESHAPING = frozenset(operations("view.default _unsafe_view"))
_EXPANDING = frozenset(operations("expand"))
_SQUEEZING = frozenset(operations("squeeze.default squeeze.dim squeeze.dims"))


def alias(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``alias`` and ``detach``, which autograd calls for most of what it saves."""
    (x,) = args
    if not isinstance(x, ShardedBatch) or not has_parts(x):
        raise Declined
    return wrap_view(x, (x.shape, x.stride(), 0), x._parts, x._layout, x.shard_dim, func)


def view_backward(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Gradients of ``select`` and ``slice`` along other dimensions: zeros except for what was taken."""
    call = named(func, args, kwargs)
    shape, spec = list(call["input_sizes"]), spec_of(args[:1])
    at, row = call["dim"] % len(shape), len(shape) - spec.from_right
    if func == torch.ops.aten.select_backward.default:
        row -= row <= at
    if at == row or shape[row] != spec.layout.num_rows:
        raise Declined
    sizes = [[*shape[:row], n, *shape[row + 1 :]] for n in spec.layout.sizes]
    rest = [constant(a, spec.layout) for a in args[2:]]
    return wrap(call_on_parts(func, [shard_rows(args[0], spec), sizes, *rest], {}), spec.layout, row)


# Copies.


def copied(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``clone`` and conversions of the dtype; a copy to another device takes the rows there directly."""
    x, call = args[0], _ordinary_call(func, args, kwargs)
    layout, device = x._layout, call.get("device") or x._layout.home
    keep = {k: call[k] for k in ("dtype", "memory_format") if call.get(k) is not None}
    if device == layout.home:
        return wrap([func(p, **keep) for p in parts_of(x)], layout, x.shard_dim)
    parts = [p.to(call["dtype"] or p.dtype) for p in parts_of(x)]
    if layout.weights is not None:
        layout = layout_of(device, [device] * len(layout.sizes), layout.sizes, layout.weights)
        return wrap([comm.copy(p, device) for p in parts], layout, x.shard_dim)
    if was_joined(x) or not x.is_contiguous() or call["memory_format"] not in (None, KEEP):
        raise Declined
    return torch.cat([comm.copy(p, device).contiguous() for p in parts], x.shard_dim)


def made_like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``zeros_like`` and others, which need only the shape."""
    x, call = args[0], _ordinary_call(func, args, kwargs)
    device = call.get("device") or x._layout.home
    if device == x._layout.home and func in _FILLED_ALIKE:
        keep = {k: v for k, v in call.items() if k in ("dtype", "memory_format", "fill_value") and v is not None}
        return wrap([func(p, **keep) for p in x._parts], x._layout, x.shard_dim)
    meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return func(meta, *args[1:], **{**kwargs, "device": device})


def _ordinary_call(func: Any, args: Args, kwargs: Kwargs) -> Kwargs:
    """Return the arguments by name if the call makes a strided, pageable tensor of a batch with parts."""
    call = named(func, args, kwargs)
    is_ordinary = call.get("layout") in (None, torch.strided) and not call.get("pin_memory")
    if not is_ordinary or not isinstance(args[0], ShardedBatch) or not has_parts(args[0]):
        raise Declined
    return call


_FILLED_ALIKE = frozenset(operations("zeros_like ones_like full_like"))

VIEWS: dict[Any, Rule] = rules_for(
    (alias, "alias detach"),
    (view, "transpose.int t permute unsqueeze squeeze.default squeeze.dim squeeze.dims select.int slice.Tensor expand "
           "split.Tensor split_with_sizes.default unbind.int view.default _unsafe_view"),
    (view_backward, "select_backward slice_backward"),
    (copied, "clone _to_copy"),
    (made_like, "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"),
)  # fmt: skip
