"""What becomes of an operation on a ``ShardedBatch`` that has no rule: it sees the joined tensor."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from everygpu.parallel.sharded_batch import Args, Kwargs, ShardedBatch, whole


def run_joined(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation on the joined tensors, as torch would without batches."""
    # In inference mode composite operations come here whole; their parts may have rules.
    result = func.decompose(*args, **kwargs) if isinstance(func, torch._ops.OpOverload) else NotImplemented
    if result is not NotImplemented:
        return result
    batches = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardedBatch)]
    joined = {id(whole(b)): b for b in batches}
    written = list(_written(func, args, kwargs))
    for b in written:
        b._memory.is_joined = True
    plain_args, plain_kwargs = _pytree.tree_map_only(ShardedBatch, whole, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for b in written:
        _follow(b)
    return _pytree.tree_map_only(Tensor, lambda t: _handed_out(t, joined), result)


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
        for leaf in _pytree.tree_leaves(value):
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
    with torch.utils._mode_utils.no_dispatch():
        before = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            if joined.numel():
                torch.ops.aten.resize_.default(x, [reach])
            torch.ops.aten.as_strided_.default(x, *place)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)
