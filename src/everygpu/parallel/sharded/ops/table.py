"""Which operations run on the parts of a ``ShardedBatch``, and how.

A rule gives exactly what the operation would give on the joined tensor, or declines by returning
NotImplemented; then the joined tensor answers. Declining is always right.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from everygpu.parallel.sharded.batch import (
    Args,
    Kwargs,
    Rule,
    ShardedBatch,
    has_parts,
    has_shards,
    parts_of,
    set_parts,
    wrap,
)
from everygpu.parallel.sharded.operands import (
    HALF,
    add_up,
    batches,
    by_element,
    constant,
    cut_alike,
    dims_of,
    each,
    everywhere,
    frame_of,
    home,
    named,
    operations,
    spread,
)
from everygpu.parallel.sharded.ops.losses import LOSSES
from everygpu.parallel.sharded.ops.views import VIEWS

# Element by element.


def in_place(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Operations on elements that write a batch: its parts are replaced, if nothing else shows them."""
    x, *others = args
    if not isinstance(x, ShardedBatch) or x._memory.is_viewed or x._joined.tensor is not None or not has_shards(x):
        return NotImplemented
    frame = frame_of(*args)
    if frame is None or any(isinstance(v, Tensor) for v in kwargs.values()):
        return NotImplemented
    fresh = [p.clone() for p in x._parts]
    parts = each(func, [fresh, *(spread(a, frame) for a in others)], kwargs, frame.layout)
    if parts is None:
        return NotImplemented
    set_parts(x, parts)
    return x


# Along one dimension, or over some.


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
    if parts is None:
        return NotImplemented
    return frame.batch(parts) if isinstance(parts[0], Tensor) else batches(frame, parts)


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


# Products with a matrix that every part needs whole.


def matrix_product(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``mm``, ``mv``: rows times a matrix, a matrix times columns, or a sum over the rows."""
    a, b = args
    a_dim, b_dim = _row_dim(a), _row_dim(b)
    if a_dim == a.ndim - 1 or b_dim == 0:
        return _sum_of_products(func, a, b)
    if (a_dim is None) == (b_dim is None):
        return NotImplemented
    layout = (b if a_dim is None else a)._layout
    columns = [everywhere(a, layout), parts_of(b)] if a_dim is None else [parts_of(a), everywhere(b, layout)]
    parts = each(func, columns, kwargs, layout)
    return NotImplemented if parts is None else wrap(parts, layout, 1 if a_dim is None else 0)


def _row_dim(x: Tensor) -> int | None:
    return x.shard_dim if isinstance(x, ShardedBatch) and has_parts(x) else None


def _sum_of_products(func: Any, a: Tensor, b: Tensor) -> Any:
    """The gradient of a weight: rows on the inner dimension of both."""
    frame = frame_of(b if _row_dim(b) == 0 else a)
    if frame is None:
        return NotImplemented
    columns = [cut_alike(a, frame._replace(from_right=1)), cut_alike(b, frame._replace(from_right=b.ndim))]
    parts = each(func, columns, {}, frame.layout)
    return NotImplemented if parts is None else add_up(parts, frame.layout)


def affine(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``addmm``: rows times a matrix, plus a bias."""
    bias, a, b = args
    frame = frame_of(a)
    if frame is None or frame.from_right != 2 or _row_dim(b) is not None or bias.ndim > 2:
        return NotImplemented
    columns = [spread(bias, frame), parts_of(a), everywhere(b, frame.layout)]
    parts = each(func, columns, kwargs, frame.layout)
    return NotImplemented if parts is None else wrap(parts, frame.layout, 0)


def batched_product(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``bmm``, one product a row."""
    frame = frame_of(*args)
    if frame is None or frame.from_right != 3:
        return NotImplemented
    parts = each(func, [cut_alike(a, frame) for a in args], kwargs, frame.layout)
    return NotImplemented if parts is None else wrap(parts, frame.layout, 0)


def beside(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``cat`` and ``stack`` of batches along another dimension than the rows'; results per replica also along it."""
    call = named(func, args, kwargs)
    tensors = call["tensors"]
    if func == torch.ops.aten.cat.default and _are_results_along(call.get("dim", 0), tensors):
        return _in_a_row(tensors)
    frame = frame_of(*tensors)
    ndims = {t.ndim for t in tensors}
    if frame is None or len(ndims) > 1:
        return NotImplemented
    is_new = func == torch.ops.aten.stack.default
    ndim = ndims.pop()
    row, dim = ndim - frame.from_right, call.get("dim", 0) % (ndim + is_new)
    if not is_new and dim == row:
        return NotImplemented
    columns = [cut_alike(t, frame) for t in tensors]
    parts = each(lambda *shards: func(shards, call.get("dim", 0)), columns, {}, frame.layout)
    return NotImplemented if parts is None else wrap(parts, frame.layout, row + (is_new and dim <= row))


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
    # Copies, as parts may be lent to replicas, which write into them.
    return wrap([p.clone() for b in batches for p in parts_of(b)], layout, batches[0].shard_dim)


UNARY = (
    "abs acos acosh angle asin asinh atan atanh bitwise_not ceil clamp clamp_max clamp_min cos cosh deg2rad digamma "
    "erf erfc erfinv exp exp2 expm1 floor frac hardshrink hardsigmoid hardswish hardtanh isinf isnan isneginf "
    "isposinf leaky_relu lgamma log log10 log1p log2 logical_not logit mish nan_to_num neg rad2deg reciprocal relu "
    "round rsqrt sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh threshold trunc "
    "celu elu gelu log_sigmoid_forward conj_physical selu isfinite"
)
BINARY = (
    "add.Tensor add.Scalar addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor copysign div eq.Tensor eq.Scalar "
    "floor_divide fmax fmin fmod.Tensor fmod.Scalar ge gt hypot le lerp logaddexp logaddexp2 logical_and logical_or "
    "logical_xor lt masked_fill maximum minimum mul.Tensor mul.Scalar ne.Tensor ne.Scalar pow.Tensor_Tensor "
    "pow.Tensor_Scalar pow.Scalar remainder rsub sub.Tensor sub.Scalar where.self where.ScalarOther where.ScalarSelf "
    "where.Scalar xlogy _prelu_kernel"
)
GRADIENTS = (
    "elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward "
    "leaky_relu_backward logit_backward log_sigmoid_backward mish_backward sigmoid_backward silu_backward "
    "softplus_backward softshrink_backward tanh_backward threshold_backward _prelu_kernel_backward"
)
WRITING = (
    "abs_ add_ addcdiv_ addcmul_ clamp_ clamp_max_ clamp_min_ copy_.default div_ exp_ fill_ floor_ log_ masked_fill_ "
    "mul_ neg_ pow_ relu_ round_ sigmoid_ sqrt_ sub_ tanh_ zero_"
)


def _build_rules() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {}
    for rule, names in (
        (by_element, f"{UNARY} {BINARY} {GRADIENTS}"),
        (in_place, WRITING),
        (along, "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod "
                "sort topk gather scatter_add scatter.src scatter.value"),
        (over_others, "argmax argmin max.dim min.dim logsumexp prod.dim_int var.correction std.correction "
                      "linalg_vector_norm norm.ScalarOpt_dim any.dim all.dim any.dims all.dims"),
        (total, "sum.default sum.dim_IntList mean.default mean.dim"),
        (extreme, "max.default min.default any.default all.default amax amin"),
        (matrix_product, "mm.default mv.default"),
        (affine, "addmm.default"),
        (batched_product, "bmm.default"),
        (beside, "cat.default stack.default"),
    ):  # fmt: skip
        rules.update(dict.fromkeys(operations(names), rule))
    return {**rules, **VIEWS, **LOSSES}


RULES: dict[Any, Rule] = _build_rules()
