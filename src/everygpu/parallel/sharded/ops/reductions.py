"""Operations along one dimension, and reductions over some or all."""

import math
from typing import Any

import torch
from torch import Tensor

from everygpu.parallel.sharded.batch import parts_of, wrap
from everygpu.parallel.sharded.dispatch import Args, Kwargs, Rule, named, rules_for
from everygpu.parallel.sharded.operands import (
    HALF,
    call_on_parts,
    constant,
    dims_of,
    move_home,
    shard_rows,
    shared_spec,
    sum_parts,
    wrap_results,
)


def along_dim(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Operations along one dimension other than the rows', which they keep: softmax, sort, gather, their gradients."""
    spec = shared_spec(*args)
    if spec is None:
        return NotImplemented
    ndims = {a.ndim for a in args if isinstance(a, Tensor)}
    ndim = max(ndims)
    if len(ndims) > 1 or named(func, args, kwargs).get("dim", -1) % ndim == ndim - spec.from_right:
        return NotImplemented
    columns = [shard_rows(a, spec) if isinstance(a, Tensor) else constant(a, spec.layout) for a in args]
    parts = call_on_parts(func, columns, kwargs, spec.layout)
    return NotImplemented if parts is None else wrap_results(spec, parts)


VARIANCES = (torch.ops.aten.var.correction, torch.ops.aten.std.correction)


def reduce_other_dims(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Reductions over dimensions other than the rows'."""
    x = args[0]
    spec = shared_spec(x)
    call = named(func, args, kwargs)
    if spec is None or call.get("dim") is None:
        return NotImplemented
    dims = dims_of(call["dim"], x.ndim)
    # torch warns that an empty part has no variance.
    has_empty_part = func in VARIANCES and not all(p.numel() for p in parts_of(x))
    if x.shard_dim in dims or has_empty_part:
        return NotImplemented
    parts = call_on_parts(func, [parts_of(x), *(constant(a, spec.layout) for a in args[1:])], kwargs, spec.layout)
    dim = x.shard_dim if call.get("keepdim") else x.shard_dim - sum(d < x.shard_dim for d in dims)
    if parts is None:
        return NotImplemented
    if isinstance(parts[0], Tensor):
        return wrap(parts, spec.layout, dim)
    return tuple(wrap(column, spec.layout, dim) for column in zip(*parts))


def sum_or_mean(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``sum`` and ``mean``, over the rows too."""
    x = args[0]
    call = named(func, args, kwargs)
    spec = shared_spec(x)
    if spec is None or x.ndim == 0:
        return NotImplemented
    dims = dims_of(call.get("dim"), x.ndim)
    if x.shard_dim not in dims:
        return reduce_other_dims(func, args, kwargs)
    is_mean = func in (torch.ops.aten.mean.default, torch.ops.aten.mean.dim)
    wanted = call.get("dtype") or (x.dtype if is_mean or x.dtype.is_floating_point or x.is_complex() else torch.int64)
    count = math.prod(x.shape[d] for d in dims)
    if wanted == torch.complex32 or (is_mean and not (count and (wanted.is_floating_point or wanted.is_complex))):
        return NotImplemented
    wide = torch.float32 if wanted in HALF else wanted
    sums = [torch.sum(p, dims, keepdim=call.get("keepdim", False), dtype=wide) for p in parts_of(x)]
    result = sum_parts(sums, spec.layout)
    return (result / count if is_mean else result).to(wanted)


def extremum(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``max``, ``min``, ``any`` and ``all`` over everything, and ``amax`` and ``amin`` over the rows too."""
    x = args[0]
    spec = shared_spec(x)
    call = named(func, args, kwargs)
    if spec is None or x.ndim == 0 or x.numel() == 0:
        return NotImplemented
    dims = dims_of(call.get("dim"), x.ndim)
    if x.shard_dim not in dims:
        return reduce_other_dims(func, args, kwargs)
    shards = [p for p in parts_of(x) if p.numel()]
    found = move_home([func(p, *args[1:], **kwargs) for p in shards], spec.layout)
    if len(call) == 1:
        return func(torch.stack(found))
    return func(torch.stack(found), [0])


REDUCTIONS: dict[Any, Rule] = rules_for(
    (along_dim, "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod "
            "sort topk gather scatter_add scatter.src scatter.value"),
    (reduce_other_dims, "argmax argmin max.dim min.dim logsumexp prod.dim_int var.correction std.correction "
                  "linalg_vector_norm norm.ScalarOpt_dim any.dim all.dim any.dims all.dims"),
    (sum_or_mean, "sum.default sum.dim_IntList mean.default mean.dim"),
    (extremum, "max.default min.default any.default all.default amax amin"),
)  # fmt: skip
