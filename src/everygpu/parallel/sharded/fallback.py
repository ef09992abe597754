"""Operations on a ``ShardedBatch`` without a rule: they run on the joined tensor."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from everygpu.errors import GatherError
from everygpu.parallel.sharded.batch import Memory, ShardedBatch, joined_values, was_joined
from everygpu.parallel.sharded.dispatch import Args, Kwargs, written_arguments
from everygpu.torch_private.modes import below_python_dispatch, reading_lazy_values


def run_joined(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation on the joined tensors, as torch would without batches."""
    with reading_lazy_values():
        # Inference mode dispatches composite operations undecomposed; the operations in them may have rules.
        result = func.decompose(*args, **kwargs) if hasattr(func, "decompose") else NotImplemented
        return _run_whole(func, args, kwargs) if result is NotImplemented else result


def _run_whole(func: Any, args: Args, kwargs: Kwargs) -> Any:
    batches = list(_batches((args, kwargs)))
    places = ((args[i] if i < len(args) else kwargs.get(name)) for i, name in written_arguments(func))
    written = [b for value in places for b in _batches(value)]
    if written and torch.Tag.inplace_view in func.tags:
        return _reshape(written[0], func, args, kwargs)
    for b in written:
        b._memory.is_joined = True
    joined = {id(joined_values(b)): b for b in batches}
    plain_args, plain_kwargs = _map_tensors(_plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if any(joined_values(b).shape != b.shape for b in written):
        raise _refusal(func)  # by ``out=``
    return _map_tensors(lambda t: _batch_of(t, joined), result)


def _reshape(x: ShardedBatch, func: Any, args: Args, kwargs: Kwargs) -> ShardedBatch:
    """``squeeze_`` and others, which torch's own functions call on what they have just made."""
    packet = getattr(torch.ops.aten, func.overloadpacket.__name__.removesuffix("_"), None)
    view_of = getattr(packet, func._schema.overload_name or "default", None)
    view = None if view_of is None or x._memory.is_viewed or was_joined(x) else view_of(*args, **kwargs)
    if not isinstance(view, ShardedBatch):
        raise _refusal(func)
    x.__dict__.update(view.__dict__ | {"_memory": Memory(), "_kept": None})
    with below_python_dispatch():
        torch.ops.aten.as_strided_.default(x, view.shape, view.stride(), 0)
    return x


def _refusal(func: Any) -> GatherError:
    name = func.overloadpacket.__name__
    return GatherError(
        f"{name}: an output whose rows are on several devices can't change its shape in place. Call "
        f"everygpu.gather(out).{name}(...), or what returns a new tensor."
    )


def _plain(t: Tensor) -> Tensor:
    return joined_values(t) if isinstance(t, ShardedBatch) else t


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Replace the tensors among an operation's arguments or results; torch's general tree_map costs 60 us a call."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_map_tensors(function, v) for v in value])
    return {k: _map_tensors(function, v) for k, v in value.items()} if isinstance(value, dict) else value


def _batches(value: Any) -> Iterator[ShardedBatch]:
    if isinstance(value, ShardedBatch):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for v in value.values() if isinstance(value, dict) else value:
            yield from _batches(v)


def _batch_of(t: Tensor, joined: dict[int, ShardedBatch]) -> Tensor:
    """Return the batch in place of its own joined tensor; mark batches whose memory the result shows as joined."""
    if id(t) in joined:
        return joined[id(t)]
    if t.layout == torch.strided and not isinstance(t, ShardedBatch):
        storage = t.untyped_storage()._cdata
        for b in joined.values():
            if joined_values(b).layout == torch.strided and joined_values(b).untyped_storage()._cdata == storage:
                b._memory.is_joined = True
    return t
