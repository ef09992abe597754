"""The arithmetic of batch normalisation over several tensors, each on its device, and its gradient."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from everygpu import comm
from everygpu.errors import ReplicaError
from everygpu.parallel.buckets.copies import Streams
from everygpu.torch_private.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks, top_saved_tensor_hooks
from everygpu.torch_private.modules import verify_batch_size

Brought = tuple[Tensor, Tensor | None, Tensor | None, "Records"]
Taken = tuple[Tensor, Tensor, Tensor, int]


def normalize_together(eps: float, records: "Records", brought: list[Brought]) -> list[Taken]:
    """Normalise all replicas' inputs in one node of the graph, whose backward therefore has all their gradients."""
    xs, weights, biases, layers = zip(*brought)
    if any(layer is not records for layer in layers):
        raise ReplicaError(
            "SyncBatchNorm: replicas came to different layers at the same time. "
            "All replicas must take the same way through the model."
        )
    _check_size(xs)
    with _keeping_tensors():
        mean, var, *ys = _Normalize.apply(eps, records, len(xs), *xs, *weights, *biases)  # type: ignore[no-untyped-call]
    count = _count(xs)
    return [(y, m, v, count) for y, (m, v) in zip(ys, _everywhere([mean, var], xs))]


@contextmanager
def _keeping_tensors() -> Iterator[None]:
    """Keep what a node saves, even in a checkpointed region: to make it again one replica would have to run again,
    but this node is all replicas'. What it keeps of the region is its input.
    """
    hooks = []
    while (top := top_saved_tensor_hooks()) is not None:
        hooks.append(top)
        pop_saved_tensor_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_tensor_hooks(pack, unpack)


def _check_size(xs: Sequence[Tensor]) -> None:
    """Refuse what torch refuses: a single value per channel has no variance."""
    rows = sum(x.shape[0] for x in xs)
    verify_batch_size([rows, *xs[0].shape[1:]])


def _count(xs: Sequence[Tensor]) -> int:
    return sum(x.numel() // x.shape[1] for x in xs)


class _Normalize(torch.autograd.Function):
    """Batch normalisation over several tensors, each on its device.

    Source:
        Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979,
        for the variance; Ioffe and Szegedy, "Batch Normalization", 2015, for the gradient.
    """

    @staticmethod
    def forward(ctx: Any, eps: float, records: "Records", num: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        xs, weights, biases = _thirds(tensors, num)
        mean, var = _statistics(xs)
        ctx.eps, ctx.num = eps, num
        ctx.streams = Streams(*(x.device for x in xs))
        ctx.save_for_backward(*tensors)
        ctx.record = records.add(mean, var, [_local_mean(x) for x in xs] if num > 1 else [])
        ctx.mark_non_differentiable(mean, var)
        ctx.set_materialize_grads(False)
        ys = (
            F.batch_norm(x, m, v, w, b, training=False, eps=eps)
            for x, w, b, (m, v) in zip(xs, weights, biases, _everywhere([mean, var], xs))
        )
        # The first output is where autograd runs this node: on the first replica's device.
        return mean, var, *ys

    @staticmethod
    def backward(ctx: Any, _mean: Any, _var: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        mean, var = ctx.record.mean, ctx.record.var
        xs, weights, biases = _thirds(ctx.saved_tensors, ctx.num)
        given = [torch.zeros_like(x) if g is None else g for x, g in zip(xs, grads)]
        with ctx.streams.current():
            if torch.is_grad_enabled():
                found = _differentiable_grads(ctx.eps, xs, weights, biases, given)
            else:
                found = _grads(ctx.eps, mean, var, xs, weights, biases, given)
        return (None, None, None, *found)


class Record:
    """The statistics of one meeting, kept by its node for as long as backward may need them."""

    def __init__(self, mean: Tensor, var: Tensor, local_means: list[Tensor]) -> None:
        self.mean = mean
        self.var = var
        self.local_means = local_means


class Records:
    """A layer's meetings whose backward is still to come. Copies of the layer begin with none."""

    def __init__(self) -> None:
        self._alive: list[weakref.ref[Record]] = []

    def add(self, mean: Tensor, var: Tensor, local_means: list[Tensor]) -> Record:
        record = Record(mean, var, local_means)
        self._alive = [ref for ref in self._alive if ref() is not None] + [weakref.ref(record)]
        return record

    def find(self, x: Tensor) -> Record | None:
        """Return the meeting that an input took part in, by the mean of its own rows."""
        alive = [record for ref in self._alive if (record := ref()) is not None]
        if len(alive) < 2:
            return alive[0] if alive else None
        mean = _local_mean(x)
        return min(alive, key=lambda r: min(float((comm.copy(m, x.device) - mean).abs().sum()) for m in r.local_means))

    def __deepcopy__(self, memo: Any) -> "Records":
        return Records()

    def __reduce__(self) -> Any:
        return Records, ()


def run_again(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, records: Records) -> Tensor:
    """Give what the layer gave in forward, to a checkpointed region that is run again for what it needs to save.

    Raises:
        ReplicaError: the region's own graph is wanted, which one replica alone doesn't have.
    """
    record = records.find(x)
    if record is None:
        raise ReplicaError(
            "SyncBatchNorm: a checkpointed region with this layer can't have its whole graph made again by one "
            "replica alone. Call torch.utils.checkpoint.checkpoint with use_reentrant=False."
        )
    with torch.no_grad():
        mean, var = comm.copy(record.mean, x.device), comm.copy(record.var, x.device)
        y = F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)
    # The node in the graph is the one made in forward; here only what follows must be recorded as it was there.
    connected = x.requires_grad or any(t is not None and t.requires_grad for t in (weight, bias))
    return y.requires_grad_(connected and torch.is_grad_enabled())


def _local_mean(x: Tensor) -> Tensor:
    return _wide(x).mean(_dims(x)).detach()


def _thirds(tensors: Sequence[Any], num: int) -> tuple[Any, Any, Any]:
    return tensors[:num], tensors[num : 2 * num], tensors[2 * num :]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _dims(x: Tensor) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


def _statistics(xs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and variance per channel over all tensors, on the first one's device."""
    home, total = xs[0].device, _count(xs)
    filled = [x for x in xs if x.numel()]
    pairs = [torch.var_mean(_wide(x), _dims(x), correction=0) for x in filled]
    shares = [x.numel() // x.shape[1] / total for x in filled]
    variances, means = zip(*_together(pairs, home))
    mean = torch.stack([m * share for m, share in zip(means, shares)]).sum(0)
    spread = [(v + (m - mean).square()) * share for v, m, share in zip(variances, means, shares)]
    return mean, torch.stack(spread).sum(0)


def _together(rows: Sequence[Sequence[Tensor]], home: torch.device) -> list[tuple[Tensor, ...]]:
    """Bring values per channel of each replica to one device, in one copy each."""
    return [row.unbind() for row in comm.copy_from_each([torch.stack(list(row)) for row in rows], home)]


def _everywhere(values: Sequence[Tensor], xs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Bring values per channel to where each replica's input is, in one copy each."""
    return [row.unbind() for row in comm.copy_to_each(torch.stack(list(values)), [x.device for x in xs])]


def _grads(
    eps: float,
    mean: Tensor,
    var: Tensor,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    count = _count(xs)
    means, scales = zip(*_everywhere([mean, (var + eps).rsqrt()], xs))
    normal = [(_wide(x) - _along(m, x)) * _along(scale, x) for x, m, scale in zip(xs, means, scales)]
    wide = [_wide(g) for g in grads]
    sums = [g.sum(_dims(g)) for g in wide]
    products = [(g * n).sum(_dims(g)) for g, n in zip(wide, normal)]
    totals = [torch.stack(column).sum(0) / count for column in zip(*_together(list(zip(sums, products)), mean.device))]
    inputs = [
        (g - _along(mean_sum, g) - n * _along(mean_product, g)) * _along(scale if w is None else scale * w, g)
        for g, n, w, scale, (mean_sum, mean_product) in zip(wide, normal, weights, scales, _everywhere(totals, xs))
    ]
    return [
        *(i.to(x.dtype) for i, x in zip(inputs, xs)),
        *(None if w is None else p.to(w.dtype) for w, p in zip(weights, products)),
        *(None if b is None else s.to(b.dtype) for b, s in zip(biases, sums)),
    ]


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """Shape values per channel so that they broadcast over ``x``, on its device."""
    return comm.copy(channels, x.device).view(1, -1, *[1] * (x.ndim - 2))


def _differentiable_grads(
    eps: float,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """Compute gradients that have gradients: of the same normalisation, made of torch's own operations."""
    mean, var = _statistics(xs)
    scale = (var + eps).rsqrt()
    normal = [(_wide(x) - _along(mean, x)) * _along(scale, x) for x in xs]
    ys = [n if w is None else n * _along(w, n) for n, w in zip(normal, weights)]
    ys = [y if b is None else y + _along(b, y) for y, b in zip(ys, biases)]
    tensors = [*xs, *weights, *biases]
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(ys, wanted, [_wide(g) for g in grads], create_graph=True, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in tensors]
