"""A batch whose rows stay on the devices that made them.

The batch stands below autograd: torch records operations on it as on any tensor, so views, in-place
operations, hooks and second derivatives are torch's own. What reaches ``__torch_dispatch__`` are the primitive
operations, forward and backward. Those with a rule run on the parts; the others on the joined tensor.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from everygpu.parallel.compiler.eval_frame import not_compiled
from everygpu.parallel.sharded.layout import (
    Joined,
    Memory,
    ShardLayout,
    concatenate,
    inference_mode,
    joined_strides,
    layout_of,
    move,
    same_rows,
)
from everygpu.torch_private.modes import without_torch_function
from everygpu.torch_private.tensors import make_wrapper_subclass, reshape_alias, throw_on_data_ptr

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Any, Args, Kwargs], Any]
"""From an operation and its arguments to the result, or NotImplemented when the joined tensor must answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How a batch answers torch: above autograd by ``function_for``, below it by a rule or on the joined tensor."""

    function_for: Callable[[Any], Rule]
    """From a function to what is called in its place."""
    rules: Mapping[Any, Rule]
    """For operations that run on the parts."""
    run_joined: Rule
    """For all other operations, and where a rule declines."""


class ShardedBatch(Tensor):
    """A tensor with the shape, dtype and device of the joined batch, whose rows live on several devices.

    ``DataParallel`` returns it in place of a joined output. Operations that work row by row, reductions and
    losses run on the parts, each on its device; plain tensors of the same batch that they meet are split
    alike. Every other operation, also in third-party code, sees the joined tensor, which is made once, when
    first needed. ``everygpu.gather(x)`` joins on purpose.

    The mean over results per replica, as of a module that returns its loss, weighs them by rows.

    Attributes:
        shards: The parts, in order, each on its device, connected to the graph.
        shard_dim: Where the rows are.
        shard_rows: Rows of the batch behind each shard, when each replica returned one number for them all: 0-dim,
            or of a shape such as (1,).
    """

    _dispatch: ClassVar[Dispatch]
    """Bound in the package's ``__init__``: the rules are made of this class."""
    shard_dim: int
    _layout: ShardLayout
    _memory: Memory
    _parts: tuple[Tensor, ...]
    _joined: Joined
    _reused_versions: tuple[int, ...] | None

    @property
    def shards(self) -> tuple[Tensor, ...]:
        return shards_of(self, self._layout, self.shard_dim)

    @property
    def shard_rows(self) -> tuple[int, ...] | None:
        return self._layout.weights

    def as_subclass(self, cls: type[Any]) -> Any:
        """Return the joined tensor as another class; torch asks no ``__torch_function__`` here."""
        return join(self).as_subclass(cls)

    @classmethod
    @not_compiled
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """Answer what never comes down to torch's operations, and what is better answered above them."""
        return cls._dispatch.function_for(func)(func, args, kwargs or {})

    @classmethod
    @not_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        rule = cls._dispatch.rules.get(func)
        with without_torch_function(), _streams_of(args):
            result = NotImplemented if rule is None else rule(func, args, kwargs or {})
            return cls._dispatch.run_joined(func, args, kwargs or {}) if result is NotImplemented else result


def _streams_of(args: Args) -> AbstractContextManager[object]:
    operands = itertools.chain.from_iterable(a if isinstance(a, (list, tuple)) else [a] for a in args)
    batch = next((a for a in operands if isinstance(a, ShardedBatch)), None)
    return nullcontext() if batch is None else batch._layout.on_streams()


def shard_batch(
    shards: Sequence[Tensor], device: torch.device, dim: int, rows: Sequence[int] | None = None
) -> ShardedBatch:
    """Make one batch of shards, without copying any.

    Args:
        shards: Shape (..., rows, ...), equal but for the rows; each on its device; not written hereafter.
        device: Where the joined tensor is made, if ever.
        dim: Where the rows are.
        rows: Rows of the data behind each entry, when shards are results per replica.
    Returns:
        A batch connected to the shards' graph.
    """
    dim = dim % shards[0].ndim
    layout = layout_of(device, [s.device for s in shards], [s.shape[dim] for s in shards], rows)
    batch: ShardedBatch = Join.apply(layout, dim, *shards)  # type: ignore[no-untyped-call]
    return batch


def has_shards(x: ShardedBatch) -> bool:
    """Tell whether the parts still are the truth: not once the joined tensor was written or handed out."""
    return not x._memory.is_joined


def has_parts(x: ShardedBatch) -> bool:
    """Tell whether ``parts_of`` has parts to give."""
    return x._layout.weights is not None or has_shards(x)


def parts_of(x: ShardedBatch) -> tuple[Tensor, ...]:
    """Return the parts without a graph; results per replica also from the joined tensor, to keep their weights."""
    if has_shards(x):
        return x._parts
    cuts = torch.split(whole(x), list(x._layout.sizes), x.shard_dim)
    return tuple(move(part, d) for part, d in zip(cuts, x._layout.devices))


def join(x: ShardedBatch) -> Tensor:
    """Return the joined tensor, on the batch's device, connected to its graph; an alias, as all views are."""
    x._memory.is_joined = True  # the alias may be written to
    with without_torch_function():
        # No rule runs this operation on the parts, unlike ``alias``, whose result would be a batch.
        alias: Tensor = reshape_alias(x, x.shape, x.stride())
        return alias


def shards_of(x: Tensor, layout: ShardLayout, dim: int) -> tuple[Tensor, ...]:
    """Return a tensor's parts as a layout says, connected to its graph; without a copy if it is laid out so."""
    if isinstance(x, ShardedBatch) and has_shards(x) and x.shard_dim == dim and same_rows(x._layout, layout):
        return tuple(_Split.apply(x))  # type: ignore[no-untyped-call]
    joined = join(x) if isinstance(x, ShardedBatch) else x
    return tuple(move(part, d) for part, d in zip(torch.split(joined, list(layout.sizes), dim), layout.devices))


# Below autograd.


def wrap(parts: Sequence[Tensor], layout: ShardLayout, dim: int) -> ShardedBatch:
    """Make a batch of parts that have no graph."""
    shape = list(parts[0].shape)
    shape[dim] = layout.num_rows
    is_inference = torch.is_inference_mode_enabled()
    return _new(shape, joined_strides(parts, shape, dim), 0, parts, layout, dim, is_inference=is_inference)


def wrap_view(
    base: ShardedBatch,
    like: Tensor,
    parts: Sequence[Tensor],
    layout: ShardLayout,
    dim: int,
    view: Callable[[Tensor], Tensor],
) -> ShardedBatch:
    """Make a batch that shares its memory with another.

    Args:
        like: Has the view's shape and strides, and its offset within the base.
        parts: What the view shows of the base's parts.
        view: Makes the view of the joined tensor.
    """
    base._memory.is_viewed = True
    offset = int(base.storage_offset() + like.storage_offset())
    batch = _new(like.shape, like.stride(), offset, parts, layout, dim, is_inference=base.is_inference())
    batch._memory = base._memory
    joined = base._joined
    batch._joined = Joined(
        memory=base._memory,
        layout=layout,
        is_inference=base.is_inference(),
        make=lambda: view(joined.get()),
        is_view=True,
    )
    return batch


def _new(
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    parts: Sequence[Tensor],
    layout: ShardLayout,
    dim: int,
    *,
    is_inference: bool,
) -> ShardedBatch:
    with without_torch_function(), inference_mode(is_inference):
        batch: ShardedBatch = make_wrapper_subclass(
            ShardedBatch, shape, strides, offset, dtype=parts[0].dtype, device=layout.home
        )
    # C++ code that takes a pointer must fail rather than read from nowhere.
    throw_on_data_ptr(batch)
    batch.shard_dim = dim
    batch._parts = tuple(parts)
    batch._layout = layout
    batch._memory = Memory()
    batch._reused_versions = None
    set_parts(batch, batch._parts)
    return batch


def set_parts(x: ShardedBatch, parts: Sequence[Tensor]) -> None:
    """Give a batch that nothing else shows other parts."""
    x._parts = tuple(parts)
    with without_torch_function():
        make = functools.partial(concatenate, x._parts, x._layout, x.shard_dim, x.shape, x.stride())
        x._joined = Joined(memory=x._memory, layout=x._layout, is_inference=x.is_inference(), make=make)


def whole(x: ShardedBatch) -> Tensor:
    """Return the joined values, the same memory every time."""
    return x._joined.get()


def _solid(x: Tensor) -> Tensor:
    """Make real memory of zeros that have none and of lazily conjugated numbers: dispatch is past both here."""
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x.resolve_conj().resolve_neg()


class Join(torch.autograd.Function):
    """Connect a batch to its shards."""

    @staticmethod
    def forward(ctx: Any, layout: ShardLayout, dim: int, *shards: Tensor) -> ShardedBatch:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.dim = layout, dim
        return wrap([_solid(s.detach()) for s in shards], layout, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * (2 + len(ctx.layout.sizes))
        with ctx.layout.on_streams():
            return None, None, *shards_of(grad, ctx.layout, ctx.dim)


class _Split(torch.autograd.Function):
    """Connect shards to their batch."""

    @staticmethod
    def forward(ctx: Any, x: ShardedBatch) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.dim = x._layout, x.shard_dim
        ctx.like = [(p.shape, p.dtype) for p in x._parts]
        return tuple(p.detach() for p in x._parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all(g is None for g in grads):
            return None
        places = zip(grads, ctx.like, ctx.layout.devices)
        full = [torch.zeros(shape, dtype=dtype, device=d) if g is None else g for g, (shape, dtype), d in places]
        return Join.apply(ctx.layout, ctx.dim, *full)  # type: ignore[no-untyped-call]
