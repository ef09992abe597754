"""Batch normalisation over the rows of all replicas."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from everygpu import comm
from everygpu.comm.streams import Streams
from everygpu.errors import CallError, CaptureError, ModuleError, ReplicaError
from everygpu.parallel.engines.scheduler import barrier, is_recomputing
from everygpu.ranks.group import Group, group_of_forward
from everygpu.torch_private.core import BatchNorm, backward_id

Module = TypeVar("Module", bound=nn.Module)
ReplicaInput = tuple[Tensor, Tensor | None, Tensor | None, "_Shared"]
ReplicaOutput = tuple[Tensor, Tensor, Tensor, "int | Tensor"]


def normalizes_shares(module: nn.Module) -> bool:
    """Whether replicas of a module take batch statistics each from its own share."""
    synced = SyncBatchNorm, nn.SyncBatchNorm
    return any(isinstance(m, BatchNorm) and not isinstance(m, synced) and m.training for m in module.modules())


class SyncBatchNorm(BatchNorm):
    """Batch normalisation whose statistics are those of the whole batch, not of one replica's share.

    ::

        network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        model = everygpu.DataParallel(everygpu.SyncBatchNorm.convert(network), ["cpu", "cpu"])
        loss = criterion(model(x), y)

    In training under ``DataParallel`` or ``TrainStep``, this layer is a barrier: all replicas normalise together, so
    outputs, gradients and running statistics are those of one device on the whole batch. In eval mode, on one
    device and outside a replica it is an ordinary batch normalisation.

    Args:
        num_features: Number of channels, the size of dimension 1.
        eps, momentum, affine, track_running_stats, device, dtype: As for ``torch.nn.BatchNorm2d``.
    Raises:
        ReplicaError: in forward, when replicas reach different layers.
        ValueError: in forward, when the input has fewer than 2 dimensions, or one value per channel in the whole batch.
        CallError: in backward, with ``create_graph=True``, or when an activation checkpoint around this layer has one
            of several replicas run it again. One around the whole model may.
    Source:
        ``torch.nn.SyncBatchNorm``, which synchronises processes, not the replicas within one.
    """

    def __init__(self, num_features: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_features, *args, **kwargs)
        self._shared = _Shared()  # as every object in an attribute

    @classmethod
    def convert(cls, module: Module) -> Module:
        """Replace every batch normalisation in a module by a ``SyncBatchNorm`` with the same parameters and buffers.

        Args:
            module: Any module; changed in place.
        Returns:
            The module; a new layer when it is itself a batch normalisation.
        Raises:
            ModuleError: a lazy layer has no number of channels yet; a layer overrides forward.
        Source:
            ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``, which drops the forward of a subclass.
        """
        if isinstance(module, BatchNorm) and not isinstance(module, cls):
            if isinstance(module, LazyModuleMixin):
                raise ModuleError(
                    f"SyncBatchNorm.convert: {type(module).__name__} doesn't know its channels yet. "
                    f"Run the model once before converting it."
                )
            if type(module).forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward):
                raise ModuleError(
                    f"SyncBatchNorm.convert: {type(module).__qualname__} has a forward of its own, which would be "
                    f"lost. Replace it by a batch normalisation and what else it does."
                )
            return cls._like(module)  # type: ignore[return-value]
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = cls.convert(child)
        return module

    convert_sync_batchnorm = convert  # torch's name

    @classmethod
    def _like(cls, layer: BatchNorm) -> "SyncBatchNorm":
        new = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="meta")
        new._parameters.update(layer._parameters)
        new._buffers.update(layer._buffers)
        new.training = layer.training
        return new

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a floating-point input of shape (rows, channels, ...); the output has its shape and device."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        if self._shared.is_parted and is_recomputing() and group_of_forward() is None:
            raise CallError(
                "SyncBatchNorm: can't be run again in backward by one replica alone, as an activation checkpoint does. "
                "Leave this layer out of torch.utils.checkpoint.checkpoint, or checkpoint the whole model."
            )
        # A node of their own on the parameters' device: torch warns of gradients from other devices.
        weight, bias = (None if p is None else p.view_as(p) for p in (self.weight, self.bias))
        normalize = partial(_normalize_together, self.eps, self._shared)
        output, mean, var, count = barrier((input, weight, bias, self._shared), normalize)
        if self.training and self.running_mean is not None:
            self._update_running_stats(mean, var, count)
        return output  # type: ignore[no-any-return]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: needs at least 2 dimensions, got {input.dim()}.")

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, var: Tensor, count: int | Tensor) -> None:
        """Update the running statistics as ``torch.nn.BatchNorm2d`` does."""
        if self.num_batches_tracked is None or self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        others = (count - 1).clamp(min=1) if isinstance(count, Tensor) else max(1, count - 1)
        for running, new in ((self.running_mean, mean), (self.running_var, var * (count / others))):
            updated = _upcast(running).mul(1 - factor).add(new, alpha=factor)
            if isinstance(count, Tensor):
                running.copy_(torch.where(count == 0, running, updated))
            elif count:  # as in torch, a batch without values leaves them alone
                running.copy_(updated)


class _Shared:
    """What a layer and its replicas have in common."""

    is_parted = False
    """Whether several replicas, or ranks, have normalised together: a part of them can't do it again by itself."""

    def __reduce__(self) -> Any:  # a copy starts fresh
        return _Shared, ()


def _normalize_together(eps: float, shared: _Shared, inputs: list[ReplicaInput]) -> list[ReplicaOutput]:
    """Normalise all replicas' inputs in one node of the graph, whose backward therefore receives all gradients."""
    xs, weights, biases, layers = zip(*inputs)
    if any(layer is not shared for layer in layers):
        raise ReplicaError(
            "SyncBatchNorm: replicas came to different layers at the same time. "
            "All replicas must take the same way through the model."
        )
    group = group_of_forward()
    if group is None and _count(xs) == 1:  # as torch refuses it: a single value has no variance
        size = [1, *xs[0].shape[1:]]
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
    if group is not None and xs[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise CaptureError("SyncBatchNorm all-reduces over processes, which can't be captured.")
    if group is None and len(xs) == 1:  # torch's own node, which can be differentiated twice
        with torch.no_grad():
            mean, var = _statistics(xs)
        y = F.batch_norm(xs[0], None, None, weights[0], biases[0], training=True, eps=eps)
        return [(y, mean, var, _count(xs))]
    shared.is_parted = True
    mean, var, total, *ys = _Normalize.apply(eps, group, len(xs), *xs, *weights, *biases)  # type: ignore[no-untyped-call]
    count = _count(xs) if total is None else total
    return [(y, m, v, count) for y, (m, v) in zip(ys, _copy_to_each([mean, var], xs))]


class _Normalize(torch.autograd.Function):
    """Batch normalisation over several tensors, each on its device.

    Source:
        Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979,
        for the variance; Ioffe and Szegedy, "Batch Normalization", 2015, for the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, eps: float, group: Group | None, num: int, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        xs, weights, biases = _by_kind(tensors, num)
        mean, var, count = (*_statistics(xs), None) if group is None else _statistics_over(group, xs)
        ctx.eps, ctx.num, ctx.group = eps, num, group
        ctx.place = 0 if group is None else group.next_place()
        ctx.streams = Streams(*(x.device for x in xs))
        ctx.save_for_backward(*tensors)
        ctx.statistics = mean, var
        ctx.mark_non_differentiable(*(t for t in (mean, var, count) if t is not None))
        ctx.set_materialize_grads(False)
        ys = (
            F.batch_norm(x, m, v, w if w is None else _upcast(w), b if b is None else _upcast(b), eps=eps)
            for x, w, b, (m, v) in zip(xs, weights, biases, _copy_to_each([mean, var], xs))
        )
        # The first output is where autograd runs this node: on the first replica's device.
        return mean, var, count, *ys

    @staticmethod
    def backward(ctx: Any, _mean: Any, _var: Any, _count: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise CallError(
                "SyncBatchNorm: gradients can't be differentiated again, got create_graph=True. Call model.module on "
                "one device, or use a normalization of each row, such as nn.GroupNorm."
            )
        xs, weights, biases = _by_kind(ctx.saved_tensors, ctx.num)
        given = [torch.zeros_like(x) if g is None else g for x, g in zip(xs, grads)]
        mean, var = ctx.statistics
        if ctx.group is not None and not ctx.group.is_in_order(backward_id(), ctx.place):
            # Replicas' threads number autograd's nodes each by themselves.
            raise CallError(
                "SyncBatchNorm: layers went backward in another order than on other ranks, which several devices in a "
                "rank may do: the ranks' sums would be mixed up. Start one process per GPU: everygpu run --processes "
                "auto train.py."
            )
        with ctx.streams.current():
            return None, None, None, *_grads(ctx.eps, mean, var, xs, weights, biases, given, ctx.group)


def _by_kind(tensors: Sequence[Any], num: int) -> tuple[Any, Any, Any]:
    return tensors[:num], tensors[num : 2 * num], tensors[2 * num :]


def _count(xs: Sequence[Tensor]) -> int:
    return sum(x.numel() // x.shape[1] for x in xs)


def _upcast(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _dims(x: Tensor) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


def _statistics(xs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and variance per channel over all tensors, on the first one's device."""
    device, count = xs[0].device, _count(xs)
    filled = [x for x in xs if x.numel()]
    if not filled:
        empty = torch.zeros(xs[0].shape[1], dtype=_upcast(xs[0]).dtype, device=device)
        return empty, empty
    pairs = [torch.var_mean(_upcast(x), _dims(x), correction=0) for x in filled]
    shares = [x.numel() // x.shape[1] / count for x in filled]
    variances, means = zip(*_copy_to_one(pairs, device))
    mean = torch.stack([m * share for m, share in zip(means, shares)]).sum(0)
    variance_terms = [(v + (m - mean).square()) * share for v, m, share in zip(variances, means, shares)]
    return mean, torch.stack(variance_terms).sum(0)


def _statistics_over(group: Group, xs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance per channel over all ranks' tensors, and how many values; a rank may have no rows."""
    channels, (mean, var) = xs[0].shape[1], _statistics(xs)
    rows = mean.new_zeros(group.size, 2 * channels + 1)
    rows[group.rank] = torch.cat([mean, var, mean.new_full((1,), _count(xs))])
    group.all_reduce(rows, in_graph=True)()
    means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    count = counts.sum()
    shares = counts / count.clamp(min=1)
    mean = (means * shares).sum(0)
    return mean, ((variances + (means - mean).square()) * shares).sum(0), count


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
    group: Group | None,
) -> list[Tensor | None]:
    means, scales = zip(*_copy_to_each([mean, (var + eps).rsqrt()], xs))
    normalized = [(_upcast(x) - _as_channels(m, x)) * _as_channels(scale, x) for x, m, scale in zip(xs, means, scales)]
    upcast = [_upcast(g) for g in grads]
    sums = [g.sum(_dims(g)) for g in upcast]
    products = [(g * n).sum(_dims(g)) for g, n in zip(upcast, normalized)]
    columns = zip(*_copy_to_one(list(zip(sums, products)), mean.device))
    totals = _means([torch.stack(column).sum(0) for column in columns], _count(xs), group)
    inputs = [
        (g - _as_channels(mean_sum, g) - n * _as_channels(mean_product, g))
        * _as_channels(scale if w is None else scale * w, g)
        for g, n, w, scale, (mean_sum, mean_product) in zip(
            upcast, normalized, weights, scales, _copy_to_each(totals, xs)
        )
    ]
    return [
        *(i.to(x.dtype) for i, x in zip(inputs, xs)),
        *(None if w is None else p.to(w.dtype) for w, p in zip(weights, products)),
        *(None if b is None else s.to(b.dtype) for b, s in zip(biases, sums)),
    ]


def _means(sums: list[Tensor], count: int, group: Group | None) -> list[Tensor]:
    """Average per-channel sums over all ranks; their gradients were weighted where they entered the forward."""
    if group is None:
        return [s / count for s in sums]
    total = torch.cat([*sums, sums[0].new_full((1,), count)])
    group.all_reduce(total, in_graph=True)()
    return list((total[:-1] / total[-1]).view(len(sums), -1).unbind())


def _as_channels(values: Tensor, x: Tensor) -> Tensor:
    """Shape values per channel so that they broadcast over ``x``."""
    return values.view(1, -1, *[1] * (x.ndim - 2))
