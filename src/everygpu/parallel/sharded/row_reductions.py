"""Sums and means over the rows of a ``ShardedBatch``, whose gradients stay on the devices.

torch's own gradient of a sum begins as one tensor of the joined shape. These functions split it as the batch is
split, which keeps the gradients of hand-written losses off the primary device.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from everygpu.parallel.sharded.batch import Join, ShardedBatch, has_shards, join, parts_of, shards_of
from everygpu.parallel.sharded.dispatch import Args, Kwargs, Rule
from everygpu.parallel.sharded.layout import DeviceWeights, ShardLayout, move, move_to_each
from everygpu.parallel.sharded.operands import HALF, dims_of, sum_parts
from everygpu.torch_private.autograd import are_transforms_active
from everygpu.torch_private.modes import is_tracing, without_torch_function


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReductionPlan:
    """One sum: ``factors[i]`` times the sum of part i, added up."""

    dims: tuple[int, ...]
    keepdim: bool
    dtype: torch.dtype | None
    factors: tuple[float | Tensor, ...]
    """Tensors on the parts' devices where only these know them."""
    is_weighted: bool


def reduce_rows(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``sum`` and ``mean``; the mean of results per replica weighs each by its replica's rows."""
    out = kwargs.get("out")
    call = _named(args, kwargs if out is None else {k: v for k, v in kwargs.items() if k != "out"})
    with without_torch_function():
        plan = None if call is None else _plan(call, is_mean=func in (torch.mean, Tensor.mean))
        if call is None or plan is None or (out is not None and not plan.is_weighted):
            return func(*args, **kwargs)
        result = _RowReduction.apply(call["input"], func, plan)  # type: ignore[no-untyped-call]
        return result if out is None else torch.mul(result, 1, out=out)


def nan_mean(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``nanmean``: the weighted mean of the results that are numbers."""
    with without_torch_function():
        call = _named(args, kwargs)
        if call is None or not _is_weighted(call["input"]):
            return func(*args, **kwargs)
        x = call.pop("input")
        is_nan = x.isnan()
        return reduce_rows(torch.mean, (x.masked_fill(is_nan, 0),), call) / reduce_rows(
            torch.mean, ((~is_nan).to(x.dtype),), call
        )


def var_and_mean(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``var_mean`` and ``std_mean``: the variance is that of the entries; the mean is weighted, as ``mean`` is."""
    with without_torch_function():
        found = func(*args, **kwargs)
        x, *rest = args or [kwargs["input"]]
        if not _is_weighted(x):
            return found
        has_dim = not rest or type(rest[0]) is not bool  # else it is ``unbiased``
        given = {**dict(zip(("dim", "unbiased", "keepdim"), rest if has_dim else ())), **kwargs}
        names = ("dim", "axis", "keepdim", "keepdims")
        return found[0], reduce_rows(torch.mean, (x,), {k: v for k, v in given.items() if k in names})


def _is_weighted(x: Any) -> bool:
    return isinstance(x, ShardedBatch) and x.shard_rows is not None


def _named(args: Args, kwargs: Kwargs) -> Kwargs | None:
    """Return the arguments of ``sum`` or ``mean`` by name; None for unusual ones, such as ``out``."""
    other_names = {"self": "input", "axis": "dim", "keepdims": "keepdim"}
    given = {**dict(zip(("input", "dim", "keepdim"), args)), **{other_names.get(k, k): v for k, v in kwargs.items()}}
    call = {"dim": None, "keepdim": False, "dtype": None, **given}
    dims = call["dim"] if isinstance(call["dim"], (tuple, list)) else [call["dim"] or 0]
    usual = len(args) <= 3 and set(call) == {"input", "dim", "keepdim", "dtype"} and all(type(d) is int for d in dims)
    return call if usual else None


def _plan(call: Kwargs, *, is_mean: bool) -> _ReductionPlan | None:
    """Plan a sum or mean over the rows; None where torch's own serves as well."""
    x = call["input"]
    if not isinstance(x, ShardedBatch) or are_transforms_active() or x.ndim == 0:
        return None
    dims = tuple(dims_of(call["dim"], x.ndim))
    count = math.prod(x.shape[d] for d in dims)
    dtype = call["dtype"] or x.dtype
    if x.shard_dim not in dims or not count or not (dtype.is_floating_point or dtype.is_complex):
        return None
    factors: tuple[float | Tensor, ...] | None = None
    if is_mean and isinstance(x.shard_rows, DeviceWeights):
        with x._layout.on_streams():
            shares = x.shard_rows.shares(x._layout.sizes) * (x._layout.num_rows / count)
            factors = tuple(map(move, shares.unbind(), x._layout.devices))
    elif is_mean and sum(x.shard_rows or ()) > 0:
        factors = tuple(share * x._layout.num_rows / count for share in x._layout.shares)
    elif not (has_shards(x) and x.requires_grad and torch.is_grad_enabled()) or is_tracing():
        return None  # torch's own: make_fx's mode would take a gradient made of parts for a constant
    plain = (1 / count if is_mean else 1.0,) * len(x._layout.sizes)
    return _ReductionPlan(
        dims=dims,
        keepdim=call["keepdim"],
        dtype=call["dtype"],
        factors=factors or plain,
        is_weighted=factors is not None,
    )


class _RowReduction(torch.autograd.Function):
    """A sum or mean over the rows."""

    @staticmethod
    def forward(ctx: Any, x: ShardedBatch, func: Any, plan: _ReductionPlan) -> Tensor:
        ctx.plan, ctx.layout, ctx.dim, ctx.dtype = plan, x._layout, x.shard_dim, x.dtype
        ctx.shapes = [[n if d == ctx.dim else s for d, s in enumerate(x.shape)] for n in x._layout.sizes]
        if plan.is_weighted:
            return _weighted_sum(parts_of(x), x._layout, plan)
        result: Tensor = func(x, plan.dims, plan.keepdim, dtype=plan.dtype)
        return result

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _func: None, _plan: None) -> Tensor:
        return _weighted_sum(shards_of(tangent, ctx.layout, ctx.dim), ctx.layout, ctx.plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        plan = ctx.plan
        grad = join(grad) if isinstance(grad, ShardedBatch) else grad
        for d in () if plan.keepdim else sorted(plan.dims):
            grad = grad.unsqueeze(d)
        with ctx.layout.on_streams():
            grads = move_to_each(grad, ctx.layout.devices)
            parts = [
                (g * factor).to(ctx.dtype).expand(shape) for g, factor, shape in zip(grads, plan.factors, ctx.shapes)
            ]
            return Join.apply(ctx.layout, ctx.dim, *parts), None, None  # type: ignore[no-untyped-call]


def _weighted_sum(shards: Sequence[Tensor], layout: ShardLayout, plan: _ReductionPlan) -> Tensor:
    dtype = plan.dtype or shards[0].dtype
    wide = torch.float32 if dtype in HALF else dtype
    parts = zip(shards, plan.factors)
    # The result of a replica without rows has weight 0, and is left out even if it is nan.
    sums = [
        _times(part.to(wide).sum(plan.dims, plan.keepdim), factor)
        for part, factor in parts
        if isinstance(factor, Tensor) or factor
    ]
    return sum_parts(sums, layout).to(dtype)


def _times(x: Tensor, factor: float | Tensor) -> Tensor:
    return torch.where(factor == 0, 0, x) * factor if isinstance(factor, Tensor) else x * factor


def composed_loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Losses that torch composes of other operations: compute them per element, then take the mean or sum here."""
    call = inspect.signature(func).bind(*args, **kwargs).arguments
    reduction = call.pop("reduction", "mean")
    is_old = call.get("size_average") is not None or call.get("reduce") is not None
    is_weighted = func is F.l1_loss and call.get("weight") is not None  # then torch divides by the weights' sum
    with without_torch_function():
        if is_old or is_weighted or reduction not in _REDUCTIONS[func is F.kl_div]:
            return func(*args, **kwargs)
        losses = func(**call, reduction="none")
        result = reduce_rows(torch.mean if reduction == "mean" else torch.sum, (losses,), {})
        return result / call["input"].shape[0] if reduction == "batchmean" else result


# kl_div's "mean" goes to torch, which warns of it.
_REDUCTIONS = {False: ("mean", "sum"), True: ("batchmean", "sum")}
_COMPOSED = (
    F.l1_loss,
    F.kl_div,
    F.poisson_nll_loss,
    F.hinge_embedding_loss,
    F.cosine_embedding_loss,
    F.margin_ranking_loss,
    F.triplet_margin_loss,
    F.gaussian_nll_loss,
    F.multilabel_soft_margin_loss,
)

ROW_REDUCTIONS: dict[Any, Rule] = {
    **dict.fromkeys((torch.sum, torch.mean, Tensor.sum, Tensor.mean), reduce_rows),
    **dict.fromkeys((torch.nanmean, Tensor.nanmean), nan_mean),
    **dict.fromkeys((torch.var_mean, torch.std_mean), var_and_mean),
    **dict.fromkeys(_COMPOSED, composed_loss),
}
