"""Rules for torch's operations on the parts of a ``ShardedBatch``, except for views.

A rule returns exactly what the operation returns on the joined tensor, or raises ``Declined``; then the operation runs
on the joined tensor. Declining is always correct.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everygpu import comm
from everygpu.errors import GatherError
from everygpu.parallel.sharded.batch import (
    ShardedBatch,
    has_parts,
    has_shards,
    joined_values,
    parts_of,
    was_joined,
    wrap,
)
from everygpu.parallel.sharded.dispatch import Args, Declined, Kwargs, Rule, named, rules_for, written_arguments
from everygpu.parallel.sharded.layout import ShardLayout, mix_weights, move, move_to_each, same_rows, split
from everygpu.torch_private.core import reading_lazy_values

HALF = (torch.float16, torch.bfloat16)


class ShardSpec(NamedTuple):
    """How the batches of one call are laid out."""

    layout: ShardLayout
    from_right: int
    """The rows' dimension, counted from the right as broadcasting does."""

    def batch(self, parts: Sequence[Tensor]) -> ShardedBatch:
        """Wrap results whose rows are on the operands' dimension."""
        dim = parts[0].ndim - self.from_right
        if dim < 0 or tuple([p.shape[dim] for p in parts]) != self.layout.sizes:
            raise Declined
        return wrap(parts, self.layout, dim)


def spec_of(values: Iterable[Any]) -> ShardSpec:
    """Return the layout that all batches among the values share."""
    found: ShardSpec | None = None
    for v in values:
        if not isinstance(v, ShardedBatch) or not has_parts(v):
            continue
        layout, from_right = v._layout, v.ndim - v.shard_dim
        if found is None:
            found = ShardSpec(layout, from_right)
        elif from_right != found.from_right or not same_rows(layout, found.layout):
            raise Declined
        elif layout.weights is not None and layout.weights is not found.layout.weights:
            weights = mix_weights(found.layout.weights, layout.weights)
            if weights is None:
                raise Declined
            found = ShardSpec(replace(layout, weights=weights), from_right)
    if found is None:
        raise Declined
    return found


# Operands, one for each part.


def shard_operand(value: Any, spec: ShardSpec) -> Sequence[Any]:
    """Split an operand into one per part as broadcasting pairs their rows."""
    if isinstance(value, ShardedBatch) and has_parts(value):
        return _parts_matching(value, spec)
    if not isinstance(value, Tensor):
        if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            raise Declined
        return constant(value, spec.layout)
    x = joined_values(value) if isinstance(value, ShardedBatch) else value
    if x.ndim == 0 and x.device.type == "cpu":
        return constant(x, spec.layout)
    dim = x.ndim - spec.from_right
    if dim < 0 or (x.shape[dim] == 1 != spec.layout.num_rows):
        return replicate_operand(x, spec.layout)
    return split_rows(x, dim, spec.layout)


def shard_rows(value: Tensor, spec: ShardSpec) -> Sequence[Tensor]:
    """Split an operand that has all rows, without broadcasting."""
    if isinstance(value, ShardedBatch) and has_parts(value):
        return _parts_matching(value, spec)
    x = joined_values(value) if isinstance(value, ShardedBatch) else value
    return split_rows(x, x.ndim - spec.from_right, spec.layout)


def constant(value: Any, layout: ShardLayout) -> list[Any]:
    """Repeat a value for every part."""
    return [value] * len(layout.sizes)


def replicate_operand(x: Tensor, layout: ShardLayout) -> list[Tensor]:
    """Copy an operand whole to every part's device."""
    plain = joined_values(x) if isinstance(x, ShardedBatch) else x
    if not _is_movable(plain, layout):
        raise Declined
    return move_to_each(plain, layout.devices)


def split_rows(x: Tensor, dim: int, layout: ShardLayout) -> list[Tensor]:
    """Split a plain tensor as the batch is split, if it has its rows, is dense and at home."""
    if dim < 0 or not _is_movable(x, layout) or x.shape[dim] != layout.num_rows:
        raise Declined
    return [move(part, d) for part, d in zip(split(x, layout, dim), layout.devices)]


def _parts_matching(x: ShardedBatch, spec: ShardSpec) -> Sequence[Tensor]:
    if x.ndim - x.shard_dim != spec.from_right or not same_rows(x._layout, spec.layout):
        raise Declined
    return parts_of(x)


def _is_movable(x: Tensor, layout: ShardLayout) -> bool:
    return x.device == layout.home and x.layout == torch.strided


def call_on_parts(func: Any, columns: Sequence[Sequence[Any]], kwargs: Kwargs) -> list[Any]:
    """Call an operation once per part, with one entry of each column."""
    try:
        return [func(*operands, **kwargs) for operands in zip(*columns)]
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # not of these operands' shapes
        raise
    except (RuntimeError, IndexError) as error:
        raise Declined from error  # The call on the joined tensor also fails, with a message about its shape.


# Results.


def move_home(parts: Sequence[Tensor], layout: ShardLayout) -> list[Tensor]:
    """Copy results to the device of the batch."""
    if all(p.device == layout.home for p in parts):
        return list(parts)
    return comm.copy_from_each(parts, layout.home)


def sum_parts(parts: Sequence[Tensor], layout: ShardLayout) -> Tensor:
    """Sum results on the device of the batch, in their order, in float32 at least."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in HALF else dtype
    found = move_home(parts, layout)
    if dtype == wide and found[0].ndim <= 1:
        return torch.stack(found).sum(0, dtype=dtype)
    return functools.reduce(torch.add, [p.to(wide) for p in found]).to(dtype)


def dims_of(dim: Any, ndim: int) -> list[int]:
    """Return the dimensions that a ``dim`` argument names: all, if it is None or empty."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(ndim))
    dims = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    for d in dims:
        if not -ndim <= d < ndim:
            raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {d})")
    return [d % ndim for d in dims]


# Pointwise operations.


def pointwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Operations with broadcasting, of one result or several."""
    spec = spec_of(args)
    if kwargs and any(isinstance(v, Tensor) for v in kwargs.values()):
        raise Declined
    parts = call_on_parts(func, [shard_operand(a, spec) for a in args], kwargs)
    if isinstance(parts[0], Tensor):
        return spec.batch(parts)
    # One that is empty on a device, as the buffer of ``log_sigmoid``, stays plain.
    return tuple(move(c[0], spec.layout.home) if c[0].shape == (0,) else spec.batch(c) for c in zip(*parts))


def in_place(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """In-place operations: replace the parts of a batch that has no views and was never joined."""
    x, *others = args
    if not isinstance(x, ShardedBatch) or x._memory.is_viewed or was_joined(x) or not has_shards(x):
        raise Declined
    spec = spec_of(args)
    if kwargs and any(isinstance(v, Tensor) for v in kwargs.values()):
        raise Declined
    columns = [[p.clone() for p in x._parts], *(shard_operand(a, spec) for a in others)]
    x._parts, x._kept = tuple(call_on_parts(func, columns, kwargs)), None
    return x


# Operations over dimensions.


def over_other_dims(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Operations along or over dimensions other than the rows: softmax, sort, gather, argmax, norms."""
    spec, call = spec_of(args), named(func, args, kwargs)
    tensors = [a for a in args if isinstance(a, Tensor)]
    ndim, row = tensors[0].ndim, tensors[0].ndim - spec.from_right
    if any(t.ndim != ndim for t in tensors):
        raise Declined
    dims = dims_of(call["dim"], ndim)
    if row in dims:
        raise Declined
    columns = [shard_rows(a, spec) if isinstance(a, Tensor) else constant(a, spec.layout) for a in args]
    if func in _VARIANCES and not all(p.numel() for p in columns[0]):
        raise Declined  # torch warns that an empty part has no variance
    parts = call_on_parts(func, columns, kwargs)
    results = [parts] if isinstance(parts[0], Tensor) else zip(*parts)
    found = [wrap(r, spec.layout, row - sum(d < row for d in dims) * (r[0].ndim < ndim)) for r in results]
    return found[0] if isinstance(parts[0], Tensor) else tuple(found)


_VARIANCES = (torch.ops.aten.var.correction, torch.ops.aten.std.correction)


def sum_or_mean(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``sum`` and ``mean``, over the rows too."""
    x, call = args[0], named(func, args, kwargs)
    spec, dims = spec_of(args), dims_of(call.get("dim"), x.ndim)
    if x.shard_dim not in dims:
        return over_other_dims(func, args, kwargs)
    is_mean = func in (torch.ops.aten.mean.default, torch.ops.aten.mean.dim)
    wanted = call["dtype"] or (x.dtype if is_mean or x.dtype.is_floating_point or x.is_complex() else torch.int64)
    count = math.prod(x.shape[d] for d in dims)
    if wanted == torch.complex32 or (is_mean and not (count and (wanted.is_floating_point or wanted.is_complex))):
        raise Declined
    wide = torch.float32 if wanted in HALF else wanted
    sums = [torch.sum(p, dims, keepdim=call.get("keepdim", False), dtype=wide) for p in parts_of(x)]
    result = sum_parts(sums, spec.layout)
    return (result / count if is_mean else result).to(wanted)


def extremum(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``max``, ``min``, ``any`` and ``all`` over everything, and ``amax`` and ``amin`` over the rows too."""
    x, call = args[0], named(func, args, kwargs)
    spec, dims = spec_of(args), dims_of(call.get("dim"), x.ndim)
    if x.shard_dim not in dims:
        return over_other_dims(func, args, kwargs)
    filled = [p for p in parts_of(x) if p.numel()]
    if not filled:
        raise Declined
    found = torch.stack(move_home([func(p, *args[1:], **kwargs) for p in filled], spec.layout))
    return func(found, [0]) if "dim" in call else func(found)


# Several tensors in one.


def concat(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``cat`` and ``stack`` of batches along another dimension than the rows."""
    call = named(func, args, kwargs)
    tensors, dim, is_new = call["tensors"], call["dim"], func == torch.ops.aten.stack.default
    spec, ndim = spec_of(tensors), tensors[0].ndim
    if any(t.ndim != ndim for t in tensors):
        raise Declined
    row, at = ndim - spec.from_right, dim % (ndim + is_new)
    if at == row and not is_new:
        raise Declined
    parts = call_on_parts(lambda *shards: func(shards, dim), [shard_rows(t, spec) for t in tensors], {})
    return wrap(parts, spec.layout, row + (is_new and at <= row))


# Losses: means over uneven parts are those of the whole.

NONE, MEAN, SUM = 0, 1, 2
"""How torch's operations number their reductions."""


def elementwise_loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Losses whose mean is over all elements, equally many in each row."""
    reduction = named(func, args, kwargs)["reduction"]
    if reduction == NONE:
        return pointwise(func, args, kwargs)
    spec = spec_of(args)
    # A sum in half precision could overflow in one part only.
    if kwargs or spec.layout.num_rows == 0 or (reduction == SUM and args[0].dtype in HALF):
        raise Declined
    parts = call_on_parts(func, [shard_operand(a, spec) for a in args], {})
    shares = spec.layout.shares if reduction == MEAN else constant(1, spec.layout)
    filled = [p.float() * share if p.dtype in HALF else p * share for p, share in zip(parts, shares) if share]
    return sum_parts(filled, spec.layout).to(parts[0].dtype)


def elementwise_loss_backward(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Gradients of element-wise losses: the mean over a part is weighted by its rows."""
    spec = spec_of(args)
    if kwargs or spec.layout.num_rows == 0:
        raise Declined
    columns = [shard_operand(a, spec) for a in args]
    is_mean = named(func, args, kwargs)["reduction"] == MEAN
    shares = spec.layout.shares if is_mean else constant(1, spec.layout)
    if is_mean:
        columns[0] = [g * share for g, share in zip(columns[0], shares)]
    parts = call_on_parts(func, columns, {})
    # A part of weight 0 has zero gradients, even if its loss is nan.
    return spec.batch([p if s else torch.zeros_like(p) for p, s in zip(parts, shares)])


def class_loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``nll_loss``, whose mean counts only rows that are not ignored, by class weight."""
    x, target, weight, reduction, ignore_index = args
    spec, columns = _class_operands(x, target, weight)
    layout = spec.layout
    if reduction == NONE:
        pairs = [func(*operands, NONE, ignore_index) for operands in zip(*columns)]
        return wrap([loss for loss, _ in pairs], layout, 0), torch.zeros((), dtype=x.dtype, device=layout.home)
    # Sum over a part in float32 at least: in half precision the sum could overflow where the mean does not.
    if x.dtype in HALF:
        columns = [c if k == 1 else [None if t is None else t.float() for t in c] for k, c in enumerate(columns)]
    pairs = [func(*operands, SUM, ignore_index) for operands in zip(*columns)]
    # One copy moves both; they don't share memory afterwards, as autograd keeps one and the caller may write the other.
    loss, count = sum_parts([torch.stack(pair) for pair in pairs], layout).unbind()
    return (loss / count if reduction == MEAN else loss.clone()).to(x.dtype), count.to(x.dtype)


def class_loss_backward(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Gradient of ``nll_loss``: every part divides by the count over the whole batch."""
    grad, x, target, weight, reduction, ignore_index, count = args
    spec, columns = _class_operands(x, target, weight)
    if grad.ndim:
        grads = shard_rows(grad, spec._replace(from_right=grad.ndim))
        counts: Sequence[Tensor] = replicate_operand(count, spec.layout)
    else:  # in one copy
        pairs = replicate_operand(torch.stack([grad, count]), spec.layout)
        grads, counts = zip(*(pair.unbind() for pair in pairs))
    constants = [constant(c, spec.layout) for c in (reduction, ignore_index)]
    return wrap(call_on_parts(func, [grads, *columns, *constants, counts], {}), spec.layout, 0)


def _class_operands(x: Any, target: Tensor, weight: Tensor | None) -> tuple[ShardSpec, list[Sequence[Any]]]:
    """Split scores of shape (rows, classes, ...), targets of shape (rows, ...) and weights of classes."""
    is_fit = isinstance(x, ShardedBatch) and has_parts(x) and x.ndim >= 2 and x.shard_dim == 0
    if not is_fit or target.ndim != x.ndim - 1 or (isinstance(target, ShardedBatch) and target.shard_dim != 0):
        raise Declined
    spec = spec_of([x])
    targets = shard_rows(target, spec._replace(from_right=target.ndim))
    weights = constant(None, spec.layout) if weight is None else replicate_operand(weight, spec.layout)
    return spec, [parts_of(x), targets, weights]


class RuleTable(dict[Any, "Rule | None"]):
    """Rules by operation; one that isn't named gets its rule from its tags when it is first asked for."""

    def __missing__(self, func: Any) -> Rule | None:
        tags, written = getattr(func, "tags", ()), [place for place, _ in written_arguments(func)]
        rule: Rule | None = None
        # Random numbers are drawn for the whole, in its order.
        is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
        if is_pointwise and not func.is_view and all(str(r.type) == "Tensor" for r in func._schema.returns):
            rule = pointwise if not written else in_place if written == [0] else None
        self[func] = rule
        return rule


UNTAGGED = (
    "_prelu_kernel _prelu_kernel_backward elu_backward floor_divide hardshrink_backward hardsigmoid_backward hardswish "
    "hardswish_backward hardtanh_backward leaky_relu_backward log_sigmoid_backward log_sigmoid_forward masked_fill "
    "mish_backward rsub softplus_backward softshrink_backward where.self where.ScalarOther where.ScalarSelf "
    "where.Scalar"
)
"""Pointwise operations that torch doesn't tag so."""

OVER_OTHER_DIMS = (
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod sort topk gather "
    "scatter_add scatter.src scatter.value argmax argmin max.dim min.dim logsumexp prod.dim_int var.correction "
    "std.correction linalg_vector_norm norm.ScalarOpt_dim any.dim all.dim any.dims all.dims"
)

RULES: dict[Any, Rule] = rules_for(
    (pointwise, UNTAGGED),
    (in_place, "abs_ copy_.default fill_ masked_fill_ zero_"),
    (over_other_dims, OVER_OTHER_DIMS),
    (sum_or_mean, "sum.default sum.dim_IntList mean.default mean.dim"),
    (extremum, "max.default min.default any.default all.default amax amin"),
    (concat, "cat.default stack.default"),
    (elementwise_loss, "mse_loss smooth_l1_loss huber_loss binary_cross_entropy "
                       "binary_cross_entropy_with_logits soft_margin_loss"),
    (elementwise_loss_backward, "mse_loss_backward smooth_l1_loss_backward huber_loss_backward "
                                "binary_cross_entropy_backward soft_margin_loss_backward"),
    (class_loss, "nll_loss_forward nll_loss2d_forward"),
    (class_loss_backward, "nll_loss_backward nll_loss2d_backward"),
)  # fmt: skip


# Operations without a rule.


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
        raise _refusal(func)
    for b in written:
        b._memory.is_joined = True
    joined = {id(joined_values(b)): b for b in batches}
    plain_args, plain_kwargs = _map_tensors(_plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if any(joined_values(b).shape != b.shape for b in written):
        raise _refusal(func)  # by ``out=``
    return _map_tensors(lambda t: _batch_of(t, joined), result)


def _refusal(func: Any) -> GatherError:
    name = func.overloadpacket.__name__
    return GatherError(
        f"{name}: an output whose rows are on several devices can't change its shape in place. Call "
        f"everygpu.parallel.gather(out).{name}(...), or what returns a new tensor."
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
