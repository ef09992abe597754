"""Operations on a ``ShardedBatch`` without a rule: they run on the joined tensor."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from everygpu.parallel.sharded.batch import ShardedBatch, joined_values, wrap
from everygpu.parallel.sharded.dispatch import Args, Kwargs
from everygpu.parallel.sharded.operands import ShardSpec, shared_spec, split_rows
from everygpu.torch_private.modes import below_python_dispatch, reading_lazy_values


def run_joined(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation on the joined tensors, as torch would without batches."""
    with reading_lazy_values():
        # Inference mode dispatches composite operations undecomposed; the operations in them may have rules.
        result = func.decompose(*args, **kwargs) if hasattr(func, "decompose") else NotImplemented
        return _run_whole(func, args, kwargs) if result is NotImplemented else result


def _run_whole(func: Any, args: Args, kwargs: Kwargs) -> Any:
    batches = list(_batches((args, kwargs)))
    written = list(_written_batches(func, args, kwargs))
    spec = None if written else _results_spec(func, batches)
    for b in written:
        b._memory.is_joined = True
        if b._memory.is_viewed:
            # Views are made of the tensor that the batch had, whose shape must not change.
            b._kept = replace(b._joined, tensor=joined_values(b).detach())
    joined = {id(joined_values(b)): b for b in batches}
    plain_args, plain_kwargs = map_tensors(_plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for b in written:
        _match_shape(b)
    result = map_tensors(lambda t: _batch_of(t, joined), result)
    return result if spec is None else map_tensors(lambda t: _with_weights(t, spec), result)


def _plain(t: Tensor) -> Tensor:
    return joined_values(t) if isinstance(t, ShardedBatch) else t


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Replace the tensors among an operation's arguments or results; torch's general tree_map costs 60 us a call."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(function, v) for v in value])
    return {k: map_tensors(function, v) for k, v in value.items()} if isinstance(value, dict) else value


def _batches(value: Any) -> Iterator[ShardedBatch]:
    if isinstance(value, ShardedBatch):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for v in value.values() if isinstance(value, dict) else value:
            yield from _batches(v)


_ENTRY_PER_REPLICA = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "native_dropout")
)
"""Operations that keep one entry per replica, beside those that torch tags as pointwise."""


def _results_spec(func: Any, batches: Sequence[ShardedBatch]) -> ShardSpec | None:
    """Return the layout of an operation's results, if it has one entry for each result per replica."""
    if all(b._layout.weights is None for b in batches):
        return None
    is_keeping = torch.Tag.pointwise in getattr(func, "tags", ()) or func in _ENTRY_PER_REPLICA
    return shared_spec(*batches) if is_keeping else None


def _with_weights(t: Tensor, spec: ShardSpec) -> Tensor:
    """Keep the weights of a result that has an entry for each replica."""
    dim = t.ndim - spec.from_right
    parts = split_rows(t, dim, spec.layout) if dim >= 0 and not isinstance(t, ShardedBatch) else None
    return t if parts is None else wrap(parts, spec.layout, dim)


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


def _written_batches(func: Any, args: Args, kwargs: Kwargs) -> Iterator[ShardedBatch]:
    for place, name in _written_arguments(func):
        yield from _batches(args[place] if place < len(args) else kwargs.get(name))


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ()
    arguments = enumerate(schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _cut_again(x: ShardedBatch, shape: Sequence[int]) -> None:
    """Find the rows in a new shape; where none has as many, cut its first dimension as evenly as it can be."""
    layout = replace(x._layout, weights=None)
    rows = [x.shard_dim, *range(len(shape))]
    dim = next((d for d in rows if d < len(shape) and shape[d] == layout.num_rows), None)
    if dim is None:
        num_rows, count = shape[0] if shape else 0, len(layout.sizes)
        layout = replace(layout, sizes=tuple(num_rows // count + (i < num_rows % count) for i in range(count)))
    x._layout, x.shard_dim = layout, dim or 0


def _match_shape(x: ShardedBatch) -> None:
    """Set the shape of a batch whose joined tensor was reshaped in place, as by ``unsqueeze_``.

    Source:
        ``torch.utils._python_dispatch.return_and_correct_aliasing``.
    """
    joined = joined_values(x)
    place = (joined.shape, joined.stride(), joined.storage_offset())
    if place == (x.shape, x.stride(), x.storage_offset()):
        return
    _cut_again(x, joined.shape)
    reach = place[2] + sum((n - 1) * step for n, step in zip(*place[:2])) + 1
    with below_python_dispatch():
        if joined.numel():
            torch.ops.aten.resize_.default(x, [reach])
        torch.ops.aten.as_strided_.default(x, *place)
