"""Losses on the parts of a ``ShardedBatch``: means over uneven parts are those of the whole."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from everygpu.parallel.sharded.batch import ShardedBatch, has_parts, parts_of, wrap
from everygpu.parallel.sharded.dispatch import Args, Declined, Kwargs, Rule, named, rules_for
from everygpu.parallel.sharded.rules import (
    HALF,
    ShardSpec,
    call_on_parts,
    constant,
    pointwise,
    replicate_operand,
    shard_operand,
    shard_rows,
    spec_of,
    sum_parts,
)

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


LOSSES: dict[Any, Rule] = rules_for(
    (elementwise_loss, "mse_loss smooth_l1_loss huber_loss binary_cross_entropy "
                       "binary_cross_entropy_with_logits soft_margin_loss"),
    (elementwise_loss_backward, "mse_loss_backward smooth_l1_loss_backward huber_loss_backward "
                                "binary_cross_entropy_backward soft_margin_loss_backward"),
    (class_loss, "nll_loss_forward nll_loss2d_forward"),
    (class_loss_backward, "nll_loss_backward nll_loss2d_backward"),
)  # fmt: skip
