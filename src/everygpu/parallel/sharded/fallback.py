"""What becomes of an operation on a ``ShardedBatch`` that has no rule: it sees the joined tensor."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from everygpu.parallel.sharded.batch import Args, Kwargs, ShardedBatch, whole, wrap
from everygpu.parallel.sharded.operands import ShardSpec, cut, frame_of
from everygpu.torch_private.compiler import is_operator
from everygpu.torch_private.modes import below_python_dispatch, reading_lazy_values
from everygpu.torch_private.pytree import tree_leaves, tree_map_only


def run_joined(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation on the joined tensors, as torch would without batches."""
    with reading_lazy_values():
        # In inference mode composite operations come here whole; their parts may have rules.
        result = func.decompose(*args, **kwargs) if is_operator(func) else NotImplemented
        return _run_whole(func, args, kwargs) if result is NotImplemented else result


def _run_whole(func: Any, args: Args, kwargs: Kwargs) -> Any:
    batches = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedBatch)]
    written = list(_written(func, args, kwargs))
    frame = None if written else _results_frame(func, batches)
    for b in written:
        b._memory.is_joined = True
        if b._memory.is_viewed:
            # Views look through the tensor that the batch had, whose shape must not change.
            b._joined = replace(b._joined, tensor=whole(b).detach())
    joined = {id(whole(b)): b for b in batches}
    plain_args, plain_kwargs = tree_map_only(ShardedBatch, whole, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for b in written:
        _follow(b)
    result = tree_map_only(Tensor, lambda t: _handed_out(t, joined), result)
    return result if frame is None else tree_map_only(Tensor, lambda t: _weighed(t, frame), result)


_KEEPING = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "native_dropout")
)
"""Operations that keep one entry per replica, beside those that torch tags as element by element."""


def _results_frame(func: Any, batches: Sequence[ShardedBatch]) -> ShardSpec | None:
    """Return where an operation on results per replica has its results, if it has one for each of them."""
    if all(b._layout.weights is None for b in batches):
        return None
    is_keeping = torch.Tag.pointwise in getattr(func, "tags", ()) or func in _KEEPING
    return frame_of(*batches) if is_keeping else None


def _weighed(t: Tensor, frame: ShardSpec) -> Tensor:
    """Keep the weights of a result that has an entry for each replica."""
    dim = t.ndim - frame.from_right
    parts = cut(t, dim, frame.layout) if dim >= 0 and not isinstance(t, ShardedBatch) else None
    return t if parts is None else wrap(parts, frame.layout, dim)


def _handed_out(t: Tensor, joined: dict[int, ShardedBatch]) -> Tensor:
    """Give back the batch itself for its joined tensor; note who got a view of it, and may write there."""
    if id(t) in joined:
        return joined[id(t)]
    if t.layout == torch.strided and not isinstance(t, ShardedBatch):
        storage = t.untyped_storage()._cdata
        for b in joined.values():
            if whole(b).layout == torch.strided and whole(b).untyped_storage()._cdata == storage:
                b._memory.is_joined = True
    return t


def _written(func: Any, args: Args, kwargs: Kwargs) -> Iterator[ShardedBatch]:
    for place, name in _written_arguments(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        for leaf in tree_leaves(value):
            if isinstance(leaf, ShardedBatch):
                yield leaf


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ()
    arguments = enumerate(schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _follow(x: ShardedBatch) -> None:
    """Give a batch the shape that its joined tensor has been given in place, as by ``unsqueeze_``.

    Source:
        ``torch.utils._python_dispatch.return_and_correct_aliasing``.
    """
    joined = whole(x)
    place = (joined.shape, joined.stride(), joined.storage_offset())
    if place == (x.shape, x.stride(), x.storage_offset()):
        return
    x._layout = replace(x._layout, weights=None)
    reach = place[2] + sum((n - 1) * step for n, step in zip(*place[:2])) + 1
    with below_python_dispatch():
        if joined.numel():
            torch.ops.aten.resize_.default(x, [reach])
        torch.ops.aten.as_strided_.default(x, *place)
