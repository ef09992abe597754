"""Batch normalisation over several tensors, each on its device: forward, gradient, second gradient."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from everygpu import comm
from everygpu.errors import CallError, CaptureError, ReplicaError
from everygpu.parallel.buckets.copies import Streams
from everygpu.ranks.group import Group
from everygpu.ranks.spread_batch import SpreadBatch, batch_of_forward
from everygpu.torch_private.autograd import (
    backward_id,
    checkpoint_frames,
    without_saved_tensor_hooks,
)

ReplicaInput = tuple[Tensor, Tensor | None, Tensor | None, "RegionStatistics"]
ReplicaOutput = tuple[Tensor, Tensor, Tensor, "int | Tensor"]


def normalize_together(
    eps: float, live: "RegionStatistics", inputs_of_replicas: list[ReplicaInput]
) -> list[ReplicaOutput]:
    """Normalise all replicas' inputs in one node of the graph, whose backward therefore receives all gradients."""
    xs, weights, biases, layers = zip(*inputs_of_replicas)
    if any(layer is not live for layer in layers):
        raise ReplicaError(
            "SyncBatchNorm: replicas came to different layers at the same time. "
            "All replicas must take the same way through the model."
        )
    whole = batch_of_forward()
    if whole is None:
        _check_size(xs)
    elif xs[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise CaptureError("SyncBatchNorm adds up over several processes, which no recording does.")
    # Even in a checkpointed region: the node belongs to all replicas, and one alone can't recompute what it saves.
    with without_saved_tensor_hooks():
        mean, var, total, *ys = _Normalize.apply(eps, whole, len(xs), *xs, *weights, *biases)  # type: ignore[no-untyped-call]
    count = _count(xs) if total is None else total
    return [(y, m, v, count) for y, (m, v) in zip(ys, _copy_to_each([mean, var], xs))]


def _check_size(xs: Sequence[Tensor]) -> None:
    """Refuse what torch refuses: a single value per channel has no variance."""
    if _count(xs) == 1:
        size = [1, *xs[0].shape[1:]]
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")


def _count(xs: Sequence[Tensor]) -> int:
    return sum(x.numel() // x.shape[1] for x in xs)


class _Normalize(torch.autograd.Function):
    """Batch normalisation over several tensors, each on its device.

    Source:
        Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979,
        for the variance; Ioffe and Szegedy, "Batch Normalization", 2015, for the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, eps: float, whole: SpreadBatch | None, num: int, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        xs, weights, biases = _by_kind(tensors, num)
        mean, var, count = (*_statistics(xs), None) if whole is None else _statistics_over(whole.group, xs)
        ctx.eps, ctx.num, ctx.whole = eps, num, whole
        ctx.streams = Streams(*(x.device for x in xs))
        ctx.save_for_backward(*tensors)
        ctx.statistics = mean, var
        ctx.mark_non_differentiable(*(t for t in (mean, var, count) if t is not None))
        ctx.set_materialize_grads(False)
        ys = (
            F.batch_norm(x, m, v, w, b, training=False, eps=eps)
            for x, w, b, (m, v) in zip(xs, weights, biases, _copy_to_each([mean, var], xs))
        )
        # The first output is where autograd runs this node: on the first replica's device.
        return mean, var, count, *ys

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        raise CallError(
            "SyncBatchNorm: forward-mode differentiation needs eval mode, got a layer in training. Use reverse mode, "
            "or a normalization of each row, such as nn.GroupNorm."
        )

    @staticmethod
    def backward(ctx: Any, _mean: Any, _var: Any, _count: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        mean, var = ctx.statistics
        xs, weights, biases = _by_kind(ctx.saved_tensors, ctx.num)
        given = [torch.zeros_like(x) if g is None else g for x, g in zip(xs, grads)]
        with ctx.streams.current():
            if torch.is_grad_enabled():
                if ctx.whole is not None:
                    raise CallError(
                        "SyncBatchNorm: gradients over several ranks can't be differentiated again, got "
                        "create_graph=True. Use a normalization of each row, such as nn.GroupNorm."
                    )
                found = _differentiable_grads(ctx.eps, xs, weights, biases, given)
            else:
                found = _grads(ctx.eps, mean, var, xs, weights, biases, given, ctx.whole)
        return (None, None, None, *found)


class RegionStatistics:
    """Mean and variance of a layer's forwards in checkpointed regions, for when a region is run again.

    By the region's frame, which lives as long as its graph, in the order of calls. Copies of the layer start empty.
    """

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[Any, list[tuple[Tensor, Tensor]]] = weakref.WeakKeyDictionary()
        self._places: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        """By frame, the backward that runs it again, and how many calls of it were answered."""

    def keep(self, mean: Tensor, var: Tensor) -> None:
        """Keep what a call has found, on its replica's device."""
        for frame in checkpoint_frames()[0]:
            self._kept.setdefault(frame, []).append((mean, var))

    def again(self) -> tuple[Tensor, Tensor] | None:
        """Return what the call that is run again has found; None where that isn't known."""
        frame = checkpoint_frames()[1]
        kept = self._kept.get(frame, []) if frame is not None else []
        backward, place = self._places.get(frame, (None, 0)) if frame is not None else (None, 0)
        place = place if backward == backward_id() else 0
        if place >= len(kept):
            return None
        self._places[frame] = backward_id(), place + 1
        self.keep(*kept[place])  # regions within this one are made anew
        return kept[place]

    def __deepcopy__(self, memo: Any) -> "RegionStatistics":
        return RegionStatistics()

    def __reduce__(self) -> Any:
        return RegionStatistics, ()


def run_again(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kept: RegionStatistics) -> Tensor:
    """Return the layer's output of the forward again, for a checkpointed region that is recomputed.

    Raises:
        ReplicaError: reentrant checkpointing, which needs the region's own graph: one replica alone doesn't have it.
    """
    statistics = kept.again()
    if statistics is None:
        raise ReplicaError(
            "SyncBatchNorm: a checkpointed region with this layer can't have its whole graph made again by one "
            "replica alone. Call torch.utils.checkpoint.checkpoint with use_reentrant=False."
        )
    with torch.no_grad():
        y = F.batch_norm(x, *statistics, weight, bias, training=False, eps=eps)
    # The graph has the node of the forward; the output only needs requires_grad for what follows to be recorded.
    connected = x.requires_grad or any(t is not None and t.requires_grad for t in (weight, bias))
    return y.requires_grad_(connected and torch.is_grad_enabled())


def _by_kind(tensors: Sequence[Any], num: int) -> tuple[Any, Any, Any]:
    return tensors[:num], tensors[num : 2 * num], tensors[2 * num :]


def _upcast(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _dims(x: Tensor) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


def _statistics(xs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and variance per channel over all tensors, on the first one's device."""
    device, count = xs[0].device, _count(xs)
    filled = [x for x in xs if x.numel()]
    pairs = [torch.var_mean(_upcast(x), _dims(x), correction=0) for x in filled]
    shares = [x.numel() // x.shape[1] / count for x in filled]
    variances, means = zip(*_copy_to_one(pairs, device))
    mean = torch.stack([m * share for m, share in zip(means, shares)]).sum(0)
    variance_terms = [(v + (m - mean).square()) * share for v, m, share in zip(variances, means, shares)]
    return mean, torch.stack(variance_terms).sum(0)


def _statistics_over(group: Group, xs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance per channel over all ranks' tensors, and how many values; a rank may have no rows."""
    own, channels = _count(xs), xs[0].shape[1]
    empty = torch.zeros(channels, dtype=_upcast(xs[0]).dtype, device=xs[0].device)
    mean, var = _statistics(xs) if own else (empty, empty)
    rows = empty.new_zeros(group.size, 2 * channels + 1)
    rows[group.rank] = torch.cat([mean, var, mean.new_full((1,), own)])
    rows = _sum_over(group, rows)
    means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    count = counts.sum()
    shares = counts / count
    mean = (means * shares).sum(0)
    return mean, ((variances + (means - mean).square()) * shares).sum(0), count


def _sum_over(group: Group, x: Tensor) -> Tensor:
    group.all_reduce(x)()
    return x


def _copy_to_one(rows: Sequence[Sequence[Tensor]], device: torch.device) -> list[tuple[Tensor, ...]]:
    """Copy values per channel of each replica to one device, in one copy each."""
    return [row.unbind() for row in comm.copy_from_each([torch.stack(list(row)) for row in rows], device)]


def _copy_to_each(values: Sequence[Tensor], xs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Copy values per channel to each replica's device, in one copy each."""
    return [row.unbind() for row in comm.copy_to_each(torch.stack(list(values)), [x.device for x in xs])]


def _grads(
    eps: float,
    mean: Tensor,
    var: Tensor,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    grads: Sequence[Tensor],
    whole: SpreadBatch | None,
) -> list[Tensor | None]:
    means, scales = zip(*_copy_to_each([mean, (var + eps).rsqrt()], xs))
    normalized = [(_upcast(x) - _per_channel(m, x)) * _per_channel(scale, x) for x, m, scale in zip(xs, means, scales)]
    upcast = [_upcast(g) for g in grads]
    sums = [g.sum(_dims(g)) for g in upcast]
    products = [(g * n).sum(_dims(g)) for g, n in zip(upcast, normalized)]
    columns = zip(*_copy_to_one(list(zip(sums, products)), mean.device))
    totals = _means([torch.stack(column).sum(0) for column in columns], _count(xs), whole)
    inputs = [
        (g - _per_channel(mean_sum, g) - n * _per_channel(mean_product, g))
        * _per_channel(scale if w is None else scale * w, g)
        for g, n, w, scale, (mean_sum, mean_product) in zip(
            upcast, normalized, weights, scales, _copy_to_each(totals, xs)
        )
    ]
    return [
        *(i.to(x.dtype) for i, x in zip(inputs, xs)),
        *(None if w is None else p.to(w.dtype) for w, p in zip(weights, products)),
        *(None if b is None else s.to(b.dtype) for b, s in zip(biases, sums)),
    ]


def _means(sums: list[Tensor], count: int, whole: SpreadBatch | None) -> list[Tensor]:
    """Average per-channel sums over all ranks, weighted as their gradients are."""
    if whole is None:
        return [s / count for s in sums]
    weighed = torch.stack(sums) * whole.weight
    total = _sum_over(whole.group, torch.cat([weighed.flatten(), weighed.new_full((1,), count)]))
    return list((total[:-1].view_as(weighed) / (total[-1] * whole.weight)).unbind())


def _per_channel(channels: Tensor, x: Tensor) -> Tensor:
    """Copy values per channel to ``x``'s device, in a shape that broadcasts over ``x``."""
    return comm.copy(channels, x.device).view(1, -1, *[1] * (x.ndim - 2))


def _differentiable_grads(
    eps: float,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """Compute gradients with a graph, for second derivatives, by torch's own operations."""
    mean, var = _statistics(xs)
    scale = (var + eps).rsqrt()
    normalized = [(_upcast(x) - _per_channel(mean, x)) * _per_channel(scale, x) for x in xs]
    ys = [n if w is None else n * _per_channel(w, n) for n, w in zip(normalized, weights)]
    ys = [y if b is None else y + _per_channel(b, y) for y, b in zip(ys, biases)]
    tensors = [*xs, *weights, *biases]
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(ys, wanted, [_upcast(g) for g in grads], create_graph=True, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in tensors]
