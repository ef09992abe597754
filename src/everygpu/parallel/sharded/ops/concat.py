"""``cat`` and ``stack`` of batches."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from everygpu.parallel.sharded.batch import ShardedBatch, parts_of, wrap
from everygpu.parallel.sharded.dispatch import Args, Kwargs, Rule, named, rules_for
from everygpu.parallel.sharded.operands import call_on_parts, shard_rows, shared_spec


def concat(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``cat`` and ``stack`` of batches along another dimension than the rows'; results per replica also along it."""
    call = named(func, args, kwargs)
    tensors = call["tensors"]
    if func == torch.ops.aten.cat.default and _are_results_along(call.get("dim", 0), tensors):
        return _in_a_row(tensors)
    spec = shared_spec(*tensors)
    ndims = {t.ndim for t in tensors}
    if spec is None or len(ndims) > 1:
        return NotImplemented
    is_new = func == torch.ops.aten.stack.default
    ndim = ndims.pop()
    row, dim = ndim - spec.from_right, call.get("dim", 0) % (ndim + is_new)
    if not is_new and dim == row:
        return NotImplemented
    columns = [shard_rows(t, spec) for t in tensors]
    parts = call_on_parts(lambda *shards: func(shards, call.get("dim", 0)), columns, {}, spec.layout)
    return NotImplemented if parts is None else wrap(parts, spec.layout, row + (is_new and dim <= row))


def _are_results_along(dim: int, tensors: Sequence[Tensor]) -> bool:
    """Tell whether all are results per replica, alike in all but the number of entries on one dimension."""
    results = [t for t in tensors if isinstance(t, ShardedBatch) and t._layout.weights is not None]
    kinds = {(t.dtype, t._layout.home, t.shard_dim, *t.select(t.shard_dim, 0).shape) for t in results}
    return len(results) == len(tensors) and len(kinds) == 1 and dim % results[0].ndim == results[0].shard_dim


def _in_a_row(batches: Sequence[ShardedBatch]) -> ShardedBatch:
    """Chain results per replica of several calls, each entry with its weight."""
    layouts = [b._layout for b in batches]
    layout = replace(
        layouts[0],
        devices=tuple(chain.from_iterable(x.devices for x in layouts)),
        sizes=tuple(chain.from_iterable(x.sizes for x in layouts)),
        weights=tuple(chain.from_iterable(x.weights or () for x in layouts)),
        streams=tuple(dict.fromkeys(chain.from_iterable(x.streams for x in layouts))),
    )
    # Copies, as replicas may be given the parts, and write into them.
    return wrap([p.clone() for b in batches for p in parts_of(b)], layout, batches[0].shard_dim)


CONCAT: dict[Any, Rule] = rules_for((concat, "cat.default stack.default"))
