"""Functions of a ``ShardedBatch`` that don't reach ``__torch_dispatch__``, or mustn't: memory, hooks, the mean."""

import copy
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from everygpu.errors import CallError, GatherError, LossError
from everygpu.parallel.sharded.batch import (
    Join,
    ShardedBatch,
    has_shards,
    join,
    joined_values,
    parts_of,
    shards_of,
    wrap,
)
from everygpu.parallel.sharded.dispatch import Args, Kwargs, Rule
from everygpu.parallel.sharded.layout import DeviceWeights, move, move_to_each
from everygpu.parallel.sharded.rules import HALF, dims_of, sum_parts
from everygpu.torch_private.compiler import is_scripted
from everygpu.torch_private.core import (
    after_backward,
    are_transforms_active,
    is_tracing,
    tree_map_only,
    without_torch_function,
)

_ALIAS, _CAPTURED = "everygpu_alias", "everygpu_captured"


def mark_alias(node: Any, on_watch: Callable[[], None]) -> None:
    """Mark a node as a view that represents its base, with a function to call when gradients there are watched."""
    node.metadata[_ALIAS] = on_watch


def mark_captured(node: Any) -> None:
    """Say of a node that it is a replay of several outputs, which knows no gradients between them."""
    node.metadata[_CAPTURED] = True


def watch_gradient(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``retain_grad`` has the whole gradient, also what another output passes on to this one inside the replicas.

    Of ``register_hook`` a gradient that would pass the hook by is an error in backward.
    """
    with without_torch_function():
        watch = _watch(args[0], func.__name__)
        if watch is not None:
            watch.wants.add(func.__name__)
        return func(*args, **kwargs)


def _watch(x: ShardedBatch, name: str) -> "_Watch | None":
    """Watch the gradients of a replicas' output; None for what was computed from one."""
    node: Any = x.grad_fn
    if node is None or node.name() != "JoinBackward":
        return None
    if "watch" not in node.metadata:
        node.metadata["watch"] = _Watch(x, node, name)
    found: _Watch = node.metadata["watch"]
    return found


class _Watch:
    """Compares, after each backward, the gradient that came to an output with those that came to its shards."""

    def __init__(self, x: ShardedBatch, node: Any, name: str) -> None:
        self.wants: set[str] = set()
        """Functions that were called."""
        self._output = weakref.ref(x)  # which holds the node that holds this
        self._layout, self._dim, self._like = x._layout, x.shard_dim, [(p.shape, p.dtype, p.device) for p in x._parts]
        self._direct: Tensor | None = None
        self._totals: dict[int, Tensor] = {}
        shards = [_past_aliases(*place) for place in node.next_functions]
        if any(shard is not None and _CAPTURED in shard.metadata for shard, _ in shards):
            raise CallError(
                f"{name}: this output came from a captured forward, which knows no gradients between its outputs. "
                f"Pass engine='threads', or call {name} inside forward."
            )
        node.register_prehook(self._note_direct)
        for i, (shard, place) in enumerate(shards):
            if shard is not None:
                shard.register_prehook(functools.partial(self._note_total, i, place))

    def _note_direct(self, grads: Sequence[Tensor | None]) -> None:
        self._direct = grads[0]

    def _note_total(self, i: int, place: int, grads: Sequence[Tensor | None]) -> None:
        grad = grads[place]
        if grad is not None:
            if not self._totals:
                after_backward(self._finish)
            self._totals[i] = grad

    def _finish(self) -> None:
        direct, totals, x = self._direct, self._totals, self._output()
        self._direct, self._totals = None, {}
        keeps_graph = any(t.requires_grad for t in totals.values())
        with torch.set_grad_enabled(keeps_graph), without_torch_function():
            own = [None] * len(self._like) if direct is None else shards_of(direct, self._layout, self._dim)
            more = {i: t if (d := own[i]) is None else t - d for i, t in totals.items() if not _is_same(t, own[i])}
            if more and "register_hook" in self.wants:
                raise CallError(
                    "register_hook: gradients reached this output inside the replicas, by way of another output, where "
                    "its hooks don't run. Register the hook inside forward, or call retain_grad() and read .grad."
                )
            if more and "retain_grad" in self.wants and x is not None:
                zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self._like)
                parts = [more.get(i, zero) for i, zero in enumerate(zeros)]
                added = Join.apply(self._layout, self._dim, *parts)  # type: ignore[no-untyped-call]
                x.grad = added if x.grad is None else x.grad + added


def _is_same(total: Tensor, own: Tensor | None) -> bool:
    return own is not None and torch.equal(total.nan_to_num(), own.nan_to_num())


def _past_aliases(node: Any, place: int) -> tuple[Any, int]:
    """Return the node, and which of its outputs, that an alias represents."""
    while node is not None and _ALIAS in node.metadata:
        node.metadata[_ALIAS]()
        node, place = node.next_functions[0]
    return node, place


def function_for(func: Any) -> Rule:
    """Return the replacement of a function; by default one that calls the function itself."""
    # The fused kernels of scripts take pointers.
    return FUNCTIONS.get(func) or (_on_joined if is_scripted(func) else _call)


def _call(func: Any, args: Args, kwargs: Kwargs) -> Any:
    with without_torch_function():
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not any(text in str(error) for text in _NO_DATA_ERRORS):
                raise
        joined = tree_map_only(ShardedBatch, join, (args, kwargs))
        return func(*joined[0], **joined[1])


_NO_DATA_ERRORS = ("data is not allocated yet", "Cannot access data pointer", "invalid python storage")
"""torch's errors when C++ code takes a pointer, as of the lengths in ``ctc_loss``."""


def _on_joined(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call the function on the joined tensor, whose memory may be written through the result."""
    joined = [join(a) if isinstance(a, ShardedBatch) else a for a in args]
    result = func(*joined, **{k: join(v) if isinstance(v, ShardedBatch) else v for k, v in kwargs.items()})
    return next((a for a, j in zip(args, joined) if result is j), result)


def _on_values(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call a function that only reads the values."""
    return func(joined_values(args[0]), *args[1:], **kwargs)


def _l1_loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call ``l1_loss`` with its weight, which torch doesn't hand over: the frame of torch's own function has it."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not func.__code__:
        frame = frame.f_back
    weight = None if frame is None else frame.f_locals.get("weight")
    return _composed_loss(func, args, kwargs) if weight is None else _call(func, args, {**kwargs, "weight": weight})


def _deepcopied(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    x, memo = args
    if id(x) not in memo:
        with without_torch_function():
            if not x.is_leaf:
                return copy.deepcopy(join(x), memo)  # torch's error
            memo[id(x)] = copied = x.detach().clone().requires_grad_(x.requires_grad)
            copied.grad = copy.deepcopy(x.grad, memo)
    found: Tensor = memo[id(x)]
    return found


def _set_data(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], ShardedBatch):
        raise GatherError(
            "data: can't be set where rows are on several devices. Set that of everygpu.parallel.gather(out)."
        )
    return func(args[0], *(join(x) if isinstance(x, ShardedBatch) else x for x in args[1:]), **kwargs)


# One result per replica.


def _backward(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``loss.backward()``: refuse one loss per replica, whose combination into one number is unknown."""
    gradient = args[1] if len(args) > 1 else kwargs.get("gradient")
    if gradient is None:
        _refuse_one_each(args[0], "backward", "{}.backward()")
    return _call(func, args, kwargs)


def _as_number(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``loss.item()``, ``float(loss)``, ``int(loss)``."""
    name = func.__name__.strip("_")
    _refuse_one_each(args[0], name, "{}.item()" if name == "item" else f"{name}({{}})")
    return _call(func, args, kwargs)


def _formatted(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if args[1]:
        _refuse_one_each(args[0], "format", f'f"{{{{{{}}:{args[1]}}}}}"')
    return _call(func, args, kwargs)


def _refuse_one_each(x: ShardedBatch, name: str, call: str) -> None:
    if x.shard_rows is not None and x.numel() != 1:
        raise LossError(
            f"{name}: the loss must be one number, got one entry from each of {x.numel()} replicas. Call "
            f"{call.format('loss.mean()')} if it is a mean: over rows, over labels that count, or over what "
            f"DataParallel(weight=...) counts; {call.format('loss.sum()')} if it is a sum."
        )


def _unweighted(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Means that aren't weighted."""
    x = args[0] if args else kwargs["input"]
    if isinstance(x, ShardedBatch):
        _refuse_one_each(x, func.__name__, "{}")
    return _call(func, args, kwargs)


# Sums and means over the rows: torch's own gradient of a mean begins as one tensor of the joined shape, and doesn't
# know of rows behind results. These are functions of their own, whose gradients stay on the devices.


def _reduce_rows(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``sum`` and ``mean``; the mean of results per replica weights each by its replica's rows."""
    with without_torch_function():
        x, out, plan = _plan(args, kwargs, is_mean=func in (torch.mean, Tensor.mean))
        if plan is None:
            return func(*args, **kwargs)
        result = _RowReduction.apply(x, *plan)  # type: ignore[no-untyped-call]
        return result if out is None else torch.mul(result, 1, out=out)


_ARGUMENTS = ("input", "dim", "keepdim")
_OTHER_NAMES = {"self": "input", "axis": "dim", "keepdims": "keepdim"}


def _plan(args: Args, kwargs: Kwargs, *, is_mean: bool) -> tuple[Any, Tensor | None, Args | None]:
    """Plan a sum or mean over the rows of the tensor that it returns; None for mistakes and where torch serves.

    The plan is what ``_RowReduction`` takes: dimensions, ``keepdim``, dtype, and what to multiply each part's sum by,
    tensors on the parts' devices where only these know it.
    """
    call = {**dict(zip(_ARGUMENTS, args)), **{_OTHER_NAMES.get(k, k): v for k, v in kwargs.items()}}
    x, dim, keepdim, dtype, out = (call.pop(name, None) for name in (*_ARGUMENTS, "dtype", "out"))
    asked = dim if isinstance(dim, (tuple, list)) else [dim or 0]
    is_usual = len(args) <= 3 and not call and all(type(d) is int for d in asked)
    if not is_usual or not isinstance(x, ShardedBatch) or are_transforms_active():
        return x, out, None
    dims, layout, dtype = tuple(dims_of(dim, x.ndim)), x._layout, dtype or x.dtype
    count = math.prod(x.shape[d] for d in dims)
    if x.shard_dim not in dims or not count or not (dtype.is_floating_point or dtype.is_complex):
        return x, out, None
    factors: tuple[float | Tensor, ...] = (1 / count if is_mean else 1.0,) * len(layout.sizes)
    if is_mean and isinstance(layout.weights, DeviceWeights):
        with layout.on_streams():
            shares = layout.weights.shares() * (layout.num_rows / count)
            factors = tuple(map(move, shares.unbind(), layout.devices))
    elif is_mean and sum(layout.weights or ()) > 0:
        factors = tuple(share * layout.num_rows / count for share in layout.shares)
    # torch's own: make_fx's mode would take a gradient computed from parts for a constant.
    elif out is not None or is_tracing() or not (has_shards(x) and x.requires_grad and torch.is_grad_enabled()):
        return x, out, None
    return x, out, (dims, bool(keepdim), dtype, factors)


class _RowReduction(torch.autograd.Function):
    """A sum or mean over the rows."""

    @staticmethod
    def forward(
        ctx: Any, x: ShardedBatch, dims: Any, keepdim: bool, dtype: torch.dtype, factors: Sequence[float | Tensor]
    ) -> Tensor:
        ctx.added = () if keepdim else sorted(dims)
        ctx.factors, ctx.layout, ctx.dim, ctx.dtype = factors, x._layout, x.shard_dim, x.dtype
        ctx.shapes = [p.shape for p in x._parts]
        wide = torch.float32 if dtype in HALF else dtype
        with x._layout.on_streams():
            # The result of a replica without rows has weight 0, and is left out even if it is nan.
            sums = [
                _times(part.sum(dims, keepdim, dtype=wide), factor)
                for part, factor in zip(parts_of(x), factors)
                if isinstance(factor, Tensor) or factor
            ]
            return sum_parts(sums, x._layout).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad = join(grad) if isinstance(grad, ShardedBatch) else grad
        for d in ctx.added:
            grad = grad.unsqueeze(d)
        with ctx.layout.on_streams():
            grads = zip(move_to_each(grad, ctx.layout.devices), ctx.factors, ctx.shapes)
            parts = [(g * factor).to(ctx.dtype).expand(shape) for g, factor, shape in grads]
            return Join.apply(ctx.layout, ctx.dim, *parts), None, None, None, None  # type: ignore[no-untyped-call]


def _times(x: Tensor, factor: float | Tensor) -> Tensor:
    if isinstance(factor, Tensor):
        return torch.where(factor == 0, 0, x) * factor
    return x if factor == 1 else x * factor


def _composed_loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Losses that torch composes of other operations: compute them per element, then take the mean or sum here."""
    reduction = kwargs.get("reduction", "mean")
    is_old = kwargs.get("size_average") is not None or kwargs.get("reduce") is not None
    # kl_div's "mean" goes to torch, which warns of it.
    if is_old or reduction not in (("batchmean", "sum") if func is F.kl_div else ("mean", "sum")):
        return _call(func, args, kwargs)
    with without_torch_function():
        losses = func(*args, **{**kwargs, "reduction": "none"})
        result = _reduce_rows(torch.mean if reduction == "mean" else torch.sum, (losses,), {})
        rows = args[0] if args else kwargs["input"]
        return result / rows.shape[0] if reduction == "batchmean" and rows.ndim else result


def _one_hot(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Encode the parts: of a subclass, torch takes classes that are out of range, and gives rows of zeros."""
    call = {**dict(zip(("input", "num_classes"), args)), **kwargs}
    x, num_classes = call.get("input"), call.get("num_classes", -1)
    if num_classes == -1 or is_tracing() or not (isinstance(x, ShardedBatch) and has_shards(x)):
        return _on_joined(func, args, kwargs)
    with without_torch_function(), x._layout.on_streams():
        return wrap([func(part, num_classes) for part in x._parts], x._layout, x.shard_dim)


def _named(owner: Any, names: str) -> list[Any]:
    return [getattr(owner, name) for name in names.split() if hasattr(owner, name)]


FUNCTIONS: dict[Any, Rule] = {
    **dict.fromkeys(
        _named(
            Tensor,
            "numpy __array__ __dlpack__ share_memory_ apply_ map_ map2_ __reduce_ex__ data_ptr const_data_ptr "
            "mutable_data_ptr untyped_storage storage _typed_storage is_shared",
        ),
        _on_joined,
    ),
    **dict.fromkeys((torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile), _on_joined),
    torch.linalg.matrix_rank: _on_joined,  # as for any subclass, torch doesn't write ``out``
    Tensor.__cuda_array_interface__.__get__: _on_joined,
    Tensor.tolist: _on_values,
    Tensor.__format__: _formatted,
    Tensor.__deepcopy__: _deepcopied,
    Tensor.backward: _backward,
    **dict.fromkeys((Tensor.register_hook, Tensor.retain_grad), watch_gradient),
    **dict.fromkeys(_named(Tensor, "item __float__ __int__"), _as_number),
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.set_: _set_data,
    **dict.fromkeys((torch.sum, torch.mean, Tensor.sum, Tensor.mean), _reduce_rows),
    **dict.fromkeys((torch.nanmean, Tensor.nanmean, torch.var_mean, torch.std_mean), _unweighted),
    **dict.fromkeys(
        _named(
            F,
            "kl_div poisson_nll_loss hinge_embedding_loss cosine_embedding_loss margin_ranking_loss "
            "triplet_margin_loss gaussian_nll_loss multilabel_soft_margin_loss",
        ),
        _composed_loss,
    ),
    F.l1_loss: _l1_loss,
    F.one_hot: _one_hot,
}
"""Replacements of functions, by function."""
