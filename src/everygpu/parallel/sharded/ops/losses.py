"""Losses on the parts of a ``ShardedBatch``: means over uneven parts are those of the whole."""

from typing import Any

import torch
from torch import Tensor

from everygpu.parallel.sharded.batch import Args, Kwargs, Rule, ShardedBatch, has_parts, parts_of, wrap
from everygpu.parallel.sharded.layout import ShardLayout
from everygpu.parallel.sharded.operands import (
    HALF,
    ShardSpec,
    add_up,
    constant,
    cut_alike,
    each,
    everywhere,
    frame_of,
    named,
    rules_for,
    spread,
)
from everygpu.parallel.sharded.ops.pointwise import by_element

NONE, MEAN, SUM = 0, 1, 2
"""How torch's operations number their reductions."""


def elementwise_loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Losses whose mean is over all elements, equally many in each row."""
    call = named(func, args, kwargs)
    reduction = call.get("reduction", MEAN)
    if reduction == NONE:
        return by_element(func, args, kwargs)
    frame = frame_of(*args)
    # A sum in half precision could overflow in one part only.
    if frame is None or kwargs or (reduction == SUM and args[0].dtype in HALF):
        return NotImplemented
    parts = each(func, [spread(a, frame) for a in args], {}, frame.layout)
    if parts is None or frame.layout.num_rows == 0:
        return NotImplemented
    shares = frame.layout.shares if reduction == MEAN else constant(1, frame.layout)
    filled = [p.float() * share if p.dtype in HALF else p * share for p, share in zip(parts, shares) if share]
    return add_up(filled, frame.layout).to(parts[0].dtype)


def elementwise_loss_backward(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Their gradients: a part's mean counts by its rows."""
    call = named(func, args, kwargs)
    frame = frame_of(*args)
    if frame is None or kwargs or frame.layout.num_rows == 0:
        return NotImplemented
    columns = [spread(a, frame) for a in args]
    is_mean = call.get("reduction", MEAN) == MEAN
    shares = frame.layout.shares if is_mean else constant(1, frame.layout)
    if is_mean and columns[0] is not None:
        columns[0] = [g * share for g, share in zip(columns[0], shares)]
    parts = each(func, columns, {}, frame.layout)
    # A part that counts for nothing has no gradient, not even if its loss is nan.
    return (
        NotImplemented
        if parts is None
        else frame.batch([p if s else torch.zeros_like(p) for p, s in zip(parts, shares)])
    )


def class_loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``nll_loss``, whose mean counts only rows that are not ignored, by class weight."""
    x, target, weight, reduction, ignore_index = args
    frame = _class_frame(x, target)
    if frame is None:
        return NotImplemented
    layout = frame.layout
    columns = _class_columns(x, target, weight, frame)
    if any(c is None for c in columns):
        return NotImplemented
    if reduction == NONE:
        pairs = _class_losses(func, columns, NONE, ignore_index, layout)
        return wrap([loss for loss, _ in pairs], layout, 0), torch.zeros((), dtype=x.dtype, device=layout.home)
    # The sum over a part is taken in float32 at least: in half precision it could overflow where a mean does not.
    if x.dtype in HALF:
        columns = [c if k == 1 else [None if t is None else t.float() for t in c] for k, c in enumerate(columns)]
    pairs = _class_losses(func, columns, SUM, ignore_index, layout)
    # Both travel together, and don't share memory in the end: autograd keeps one, and the user may write to the other.
    loss, count = add_up([torch.stack(pair) for pair in pairs], layout).unbind()
    return (loss / count if reduction == MEAN else loss.clone()).to(x.dtype), count.to(x.dtype)


def _class_losses(func: Any, columns: list[Any], reduction: int, ignore_index: int, layout: ShardLayout) -> list[Any]:
    return [func(x, target, weight, reduction, ignore_index) for x, target, weight in zip(*columns)]


def class_loss_backward(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Its gradient: every part divides by what the whole counted."""
    grad, x, target, weight, reduction, ignore_index, count = args
    frame = _class_frame(x, target)
    if frame is None:
        return NotImplemented
    layout = frame.layout
    columns = _class_columns(x, target, weight, frame)
    constants = [constant(c, layout) for c in (reduction, ignore_index)]
    if grad.ndim:
        grads, counts = cut_alike(grad, frame._replace(from_right=grad.ndim)), everywhere(count, layout)
    else:
        grads, counts = _both_everywhere(grad, count, layout)
    parts = each(func, [grads, *columns, *constants, counts], {}, layout)
    return NotImplemented if parts is None else wrap(parts, layout, 0)


def _both_everywhere(grad: Tensor, count: Tensor, layout: ShardLayout) -> list[Any]:
    """Give every part two numbers, which travel together."""
    pairs = everywhere(torch.stack([grad, count]), layout)
    return [None, None] if pairs is None else list(zip(*(pair.unbind() for pair in pairs)))


def _class_frame(x: Tensor, target: Tensor) -> ShardSpec | None:
    """Return the layout of scores of shape (rows, classes, ...) and targets of shape (rows, ...)."""
    if not isinstance(x, ShardedBatch) or not has_parts(x) or x.ndim < 2 or x.shard_dim != 0:
        return None
    if target.ndim != x.ndim - 1 or (isinstance(target, ShardedBatch) and target.shard_dim != 0):
        return None
    return frame_of(x)


def _class_columns(x: Any, target: Tensor, weight: Tensor | None, frame: ShardSpec) -> list[Any]:
    layout = frame.layout
    targets = cut_alike(target, frame._replace(from_right=target.ndim))
    weights = constant(None, layout) if weight is None else everywhere(weight, layout)
    return [parts_of(x), targets, weights]


LOSSES: dict[Any, Rule] = rules_for(
    (elementwise_loss, "mse_loss smooth_l1_loss huber_loss binary_cross_entropy "
                       "binary_cross_entropy_with_logits soft_margin_loss"),
    (elementwise_loss_backward, "mse_loss_backward smooth_l1_loss_backward huber_loss_backward "
                                "binary_cross_entropy_backward soft_margin_loss_backward"),
    (class_loss, "nll_loss_forward nll_loss2d_forward"),
    (class_loss_backward, "nll_loss_backward nll_loss2d_backward"),
)  # fmt: skip
