"""Losses on the parts of a ``ShardedBatch``: means over uneven parts are those of the whole."""

from typing import Any

import torch
from torch import Tensor

from everygpu.parallel.sharded.batch import ShardedBatch, has_parts, parts_of, wrap
from everygpu.parallel.sharded.dispatch import Args, Kwargs, Rule, named, rules_for
from everygpu.parallel.sharded.layout import ShardLayout
from everygpu.parallel.sharded.operands import (
    HALF,
    ShardSpec,
    call_on_parts,
    constant,
    replicate_operand,
    shard_operand,
    shard_rows,
    shared_spec,
    sum_parts,
)
from everygpu.parallel.sharded.ops.pointwise import pointwise

NONE, MEAN, SUM = 0, 1, 2
"""How torch's operations number their reductions."""


def elementwise_loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Losses whose mean is over all elements, equally many in each row."""
    call = named(func, args, kwargs)
    reduction = call.get("reduction", MEAN)
    if reduction == NONE:
        return pointwise(func, args, kwargs)
    spec = shared_spec(*args)
    # A sum in half precision could overflow in one part only.
    if spec is None or kwargs or (reduction == SUM and args[0].dtype in HALF):
        return NotImplemented
    parts = call_on_parts(func, [shard_operand(a, spec) for a in args], {}, spec.layout)
    if parts is None or spec.layout.num_rows == 0:
        return NotImplemented
    shares = spec.layout.shares if reduction == MEAN else constant(1, spec.layout)
    filled = [p.float() * share if p.dtype in HALF else p * share for p, share in zip(parts, shares) if share]
    return sum_parts(filled, spec.layout).to(parts[0].dtype)


def elementwise_loss_backward(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Gradients of element-wise losses: the mean over a part is weighted by its rows."""
    call = named(func, args, kwargs)
    spec = shared_spec(*args)
    if spec is None or kwargs or spec.layout.num_rows == 0:
        return NotImplemented
    columns = [shard_operand(a, spec) for a in args]
    is_mean = call.get("reduction", MEAN) == MEAN
    shares = spec.layout.shares if is_mean else constant(1, spec.layout)
    if is_mean and columns[0] is not None:
        columns[0] = [g * share for g, share in zip(columns[0], shares)]
    parts = call_on_parts(func, columns, {}, spec.layout)
    # A part of weight 0 has zero gradients, even if its loss is nan.
    return (
        NotImplemented
        if parts is None
        else spec.batch([p if s else torch.zeros_like(p) for p, s in zip(parts, shares)])
    )


def class_loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``nll_loss``, whose mean counts only rows that are not ignored, by class weight."""
    x, target, weight, reduction, ignore_index = args
    spec = _class_spec(x, target)
    if spec is None:
        return NotImplemented
    layout = spec.layout
    columns = _class_columns(x, target, weight, spec)
    if any(c is None for c in columns):
        return NotImplemented
    if reduction == NONE:
        pairs = _class_losses(func, columns, NONE, ignore_index, layout)
        return wrap([loss for loss, _ in pairs], layout, 0), torch.zeros((), dtype=x.dtype, device=layout.home)
    # Sum over a part in float32 at least: in half precision the sum could overflow where the mean does not.
    if x.dtype in HALF:
        columns = [c if k == 1 else [None if t is None else t.float() for t in c] for k, c in enumerate(columns)]
    pairs = _class_losses(func, columns, SUM, ignore_index, layout)
    # One copy moves both; they don't share memory afterwards, as autograd keeps one and the caller may write the other.
    loss, count = sum_parts([torch.stack(pair) for pair in pairs], layout).unbind()
    return (loss / count if reduction == MEAN else loss.clone()).to(x.dtype), count.to(x.dtype)


def _class_losses(func: Any, columns: list[Any], reduction: int, ignore_index: int, layout: ShardLayout) -> list[Any]:
    return [func(x, target, weight, reduction, ignore_index) for x, target, weight in zip(*columns)]


def class_loss_backward(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Gradient of ``nll_loss``: every part divides by the count over the whole batch."""
    grad, x, target, weight, reduction, ignore_index, count = args
    spec = _class_spec(x, target)
    if spec is None:
        return NotImplemented
    layout = spec.layout
    columns = _class_columns(x, target, weight, spec)
    constants = [constant(c, layout) for c in (reduction, ignore_index)]
    if grad.ndim:
        grads, counts = shard_rows(grad, spec._replace(from_right=grad.ndim)), replicate_operand(count, layout)
    else:
        grads, counts = _both_everywhere(grad, count, layout)
    parts = call_on_parts(func, [grads, *columns, *constants, counts], {}, layout)
    return NotImplemented if parts is None else wrap(parts, layout, 0)


def _both_everywhere(grad: Tensor, count: Tensor, layout: ShardLayout) -> list[Any]:
    """Copy two numbers to every part's device, in one copy."""
    pairs = replicate_operand(torch.stack([grad, count]), layout)
    return [None, None] if pairs is None else list(zip(*(pair.unbind() for pair in pairs)))


def _class_spec(x: Tensor, target: Tensor) -> ShardSpec | None:
    """Return the layout of scores of shape (rows, classes, ...) and targets of shape (rows, ...)."""
    if not isinstance(x, ShardedBatch) or not has_parts(x) or x.ndim < 2 or x.shard_dim != 0:
        return None
    if target.ndim != x.ndim - 1 or (isinstance(target, ShardedBatch) and target.shard_dim != 0):
        return None
    return shared_spec(x)


def _class_columns(x: Any, target: Tensor, weight: Tensor | None, spec: ShardSpec) -> list[Any]:
    layout = spec.layout
    targets = shard_rows(target, spec._replace(from_right=target.ndim))
    weights = constant(None, layout) if weight is None else replicate_operand(weight, layout)
    return [parts_of(x), targets, weights]


LOSSES: dict[Any, Rule] = rules_for(
    (elementwise_loss, "mse_loss smooth_l1_loss huber_loss binary_cross_entropy "
                       "binary_cross_entropy_with_logits soft_margin_loss"),
    (elementwise_loss_backward, "mse_loss_backward smooth_l1_loss_backward huber_loss_backward "
                                "binary_cross_entropy_backward soft_margin_loss_backward"),
    (class_loss, "nll_loss_forward nll_loss2d_forward"),
    (class_loss_backward, "nll_loss_backward nll_loss2d_backward"),
)  # fmt: skip
