"""Operations along one dimension, and reductions over some or all."""

import math
from typing import Any

import torch
from torch import Tensor

from everygpu.parallel.sharded.batch import Args, Kwargs, Rule, parts_of, wrap
from everygpu.parallel.sharded.operands import (
    HALF,
    add_up,
    batches,
    constant,
    cut_alike,
    dims_of,
    each,
    frame_of,
    home,
    named,
    rules_for,
)


def along(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Operations along another dimension than the rows', which stays: softmax, sort, gather, and their gradients."""
    frame = frame_of(*args)
    if frame is None:
        return NotImplemented
    ndims = {a.ndim for a in args if isinstance(a, Tensor)}
    ndim = max(ndims)
    if len(ndims) > 1 or named(func, args, kwargs).get("dim", -1) % ndim == ndim - frame.from_right:
        return NotImplemented
    columns = [cut_alike(a, frame) if isinstance(a, Tensor) else constant(a, frame.layout) for a in args]
    parts = each(func, columns, kwargs, frame.layout)
    return NotImplemented if parts is None else batches(frame, parts)


SPREADS = (torch.ops.aten.var.correction, torch.ops.aten.std.correction)


def over_others(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Reductions over dimensions other than the rows'."""
    x = args[0]
    frame = frame_of(x)
    call = named(func, args, kwargs)
    if frame is None or call.get("dim") is None:
        return NotImplemented
    dims = dims_of(call["dim"], x.ndim)
    # Of an empty part torch would warn that it has no variance.
    is_spread = func in SPREADS and not all(p.numel() for p in parts_of(x))
    if x.shard_dim in dims or is_spread:
        return NotImplemented
    parts = each(func, [parts_of(x), *(constant(a, frame.layout) for a in args[1:])], kwargs, frame.layout)
    dim = x.shard_dim if call.get("keepdim") else x.shard_dim - sum(d < x.shard_dim for d in dims)
    if parts is None:
        return NotImplemented
    if isinstance(parts[0], Tensor):
        return wrap(parts, frame.layout, dim)
    return tuple(wrap(column, frame.layout, dim) for column in zip(*parts))


def total(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``sum`` and ``mean``, over the rows too."""
    x = args[0]
    call = named(func, args, kwargs)
    frame = frame_of(x)
    if frame is None or x.ndim == 0:
        return NotImplemented
    dims = dims_of(call.get("dim"), x.ndim)
    if x.shard_dim not in dims:
        return over_others(func, args, kwargs)
    is_mean = func in (torch.ops.aten.mean.default, torch.ops.aten.mean.dim)
    wanted = call.get("dtype") or (x.dtype if is_mean or x.dtype.is_floating_point or x.is_complex() else torch.int64)
    count = math.prod(x.shape[d] for d in dims)
    if wanted == torch.complex32 or (is_mean and not (count and (wanted.is_floating_point or wanted.is_complex))):
        return NotImplemented
    wide = torch.float32 if wanted in HALF else wanted
    sums = [torch.sum(p, dims, keepdim=call.get("keepdim", False), dtype=wide) for p in parts_of(x)]
    result = add_up(sums, frame.layout)
    return (result / count if is_mean else result).to(wanted)


def extreme(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``max``, ``min``, ``any`` and ``all`` over everything, and ``amax`` and ``amin`` over the rows too."""
    x = args[0]
    frame = frame_of(x)
    call = named(func, args, kwargs)
    if frame is None or x.ndim == 0 or x.numel() == 0:
        return NotImplemented
    dims = dims_of(call.get("dim"), x.ndim)
    if x.shard_dim not in dims:
        return over_others(func, args, kwargs)
    shards = [p for p in parts_of(x) if p.numel()]
    found = home([func(p, *args[1:], **kwargs) for p in shards], frame.layout)
    if len(call) == 1:
        return func(torch.stack(found))
    return func(torch.stack(found), [0])


REDUCTIONS: dict[Any, Rule] = rules_for(
    (along, "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod "
            "sort topk gather scatter_add scatter.src scatter.value"),
    (over_others, "argmax argmin max.dim min.dim logsumexp prod.dim_int var.correction std.correction "
                  "linalg_vector_norm norm.ScalarOpt_dim any.dim all.dim any.dims all.dims"),
    (total, "sum.default sum.dim_IntList mean.default mean.dim"),
    (extreme, "max.default min.default any.default all.default amax amin"),
)  # fmt: skip
