"""``ShardedBatch``, a wrapper subclass of ``Tensor``: how one is made, joined and split.

Dispatch is below autograd: torch records operations on a batch as on any tensor, so views, in-place operations,
hooks and second derivatives are torch's own. ``__torch_dispatch__`` receives the primitive operations, forward and
backward. Operations with a rule run on the parts; all others run on the joined tensor.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from everygpu.comm.streams import NOTHING
from everygpu.parallel.sharded.dispatch import Args, Declined, Dispatch, Kwargs
from everygpu.parallel.sharded.layout import (
    ShardLayout,
    concatenate,
    inference_mode,
    joined_strides,
    layout_of,
    move,
    same_rows,
    split,
)
from everygpu.torch_private.compiler import not_compiled
from everygpu.torch_private.core import (
    is_tracing,
    make_wrapper_subclass,
    reshape_alias,
    throw_on_data_ptr,
    without_dispatch_modes,
    without_torch_function,
)


class Memory:
    """State that a batch shares with its views, as plain tensors share a storage."""

    __slots__ = ("is_joined", "is_viewed")

    def __init__(self) -> None:
        self.is_joined = False
        """The joined tensor was written, or returned as memory to write: it is current from now on, not the parts."""
        self.is_viewed = False


@dataclass(slots=True, kw_only=True, eq=False)
class JoinedValues:
    """The joined values of a batch, made at their first use.

    A separate object, as a view's joined values hold on to its base's: autograd may keep the view in the base's own
    graph, and a reference from view to base would then keep both alive.
    """

    layout: ShardLayout
    is_inference: bool
    make: Callable[[], Tensor]
    tensor: Tensor | None = None

    def get(self) -> Tensor:
        """Return the joined values, the same memory every time."""
        with self.layout.lock:
            if self.tensor is None:
                with (
                    # A mode's tensors, such as fake ones, must not outlive it in the batch.
                    without_dispatch_modes() if is_tracing() else NOTHING,
                    without_torch_function(),
                    inference_mode(self.is_inference),
                    torch.no_grad(),
                    self.layout.on_streams(),
                    self.layout.on_home_stream(),
                ):
                    self.tensor = self.make()
            return self.tensor


class ShardedBatch(Tensor):
    """A tensor with the shape, dtype and device of the joined batch, whose rows live on several devices.

    ``DataParallel`` returns one in place of each output tensor::

        out = model(x)  # shape (rows, classes), a ShardedBatch
        loss = nn.functional.cross_entropy(out, y)  # computed on the shards; equals the loss of the whole batch
        out.shards  # one tensor per replica, each on its device
        everygpu.parallel.gather(out)  # a plain tensor on out.device

    Row-wise operations, reductions and losses run on the shards, each on its device; plain tensors of the same batch
    among their operands are split likewise. Every other operation, also in third-party code, runs on the joined tensor,
    which is made at its first use, then kept.

    The mean over results per replica, as of a module that returns its loss, weights each by its replica's rows, or by
    what ``DataParallel``'s ``weight`` says.

    Attributes:
        shards: One tensor per replica that ran, in order, of shape (..., rows of the replica, ...), on its device,
            connected to the graph.
        shard_dim: The dimension of the rows.
        shard_rows: How much each shard counts in a mean, when each replica returned one number for all its rows: 0-dim,
            or of a shape such as (1,). By its rows, or what ``DataParallel``'s ``weight`` says. None otherwise.
    Raises:
        LossError: one loss per replica, which is not one number, is asked for ``backward()``, ``item()`` or the like.
        GatherError: the batch is reshaped in place, as by ``unsqueeze_()``, or its ``data`` is set.
        CallError: in backward, when a hook on this output would miss gradients that reach it inside the replicas.
    Source:
        ``torch.distributed.tensor.DTensor`` with ``Shard(dim)``, which needs one process per device, equal code in
        all of them, and an error for operations without a rule.
    """

    _dispatch: ClassVar[Dispatch]
    """Bound in the package's ``__init__``, as the rules import this class."""
    shard_dim: int
    _layout: ShardLayout
    _memory: Memory
    _parts: tuple[Tensor, ...]
    _kept: JoinedValues | None

    @property
    def shards(self) -> tuple[Tensor, ...]:
        """One tensor per replica that ran, on its device, connected to the graph."""
        return shards_of(self, self._layout, self.shard_dim)

    @property
    def shard_rows(self) -> Sequence[float] | None:
        """How much each result per replica counts, by its rows most often; None when the shards have rows."""
        return self._layout.weights

    @property
    def _joined(self) -> JoinedValues:
        with self._layout.lock, without_torch_function():
            if self._kept is None:
                place = (self.shard_dim, self.shape, self.stride())
                make = functools.partial(concatenate, self._parts, self._layout, *place)
                self._kept = JoinedValues(layout=self._layout, is_inference=self.is_inference(), make=make)
            return self._kept

    def as_subclass(self, cls: type[Any]) -> Any:
        """Return the joined tensor as another class; torch calls no ``__torch_function__`` here."""
        return join(self).as_subclass(cls)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with without_torch_function():
            text = str(Tensor.__repr__(joined_values(self).detach(), tensor_contents=tensor_contents))  # type: ignore[call-arg, no-untyped-call]
            if self.grad_fn is not None:
                return f"{text[:-1]}, grad_fn=<{self.grad_fn.name()}>)"
            return f"{text[:-1]}, requires_grad=True)" if self.requires_grad else text

    @classmethod
    @not_compiled
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """Call the function, or its replacement where it never reaches ``__torch_dispatch__`` or must not."""
        return cls._dispatch.function_for(func)(func, args, kwargs or {})

    @classmethod
    @not_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        # A trace that doesn't know the batch doesn't know its parts: values computed from them would be constants.
        rule = None if is_tracing() else cls._dispatch.rules[func]
        with without_torch_function(), _streams_of(args):
            if rule is not None:
                with suppress(Declined):
                    return rule(func, args, kwargs or {})
            return cls._dispatch.run_joined(func, args, kwargs or {})


def _streams_of(args: Args) -> AbstractContextManager[object]:
    for arg in args:
        for x in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(x, ShardedBatch):
                return x._layout.on_streams()
    return NOTHING


def shard_batch(
    shards: Sequence[Tensor], device: torch.device, dim: int, rows: Sequence[float] | None = None
) -> ShardedBatch:
    """Make one batch of shards, without copying any, connected to their graph.

    These must not be written afterwards. ``rows`` is how much each entry counts, when shards are results per replica.
    """
    dim = dim % shards[0].ndim
    layout = layout_of(device, [s.device for s in shards], [s.shape[dim] for s in shards], rows)
    batch: ShardedBatch = Join.apply(layout, dim, *shards)  # type: ignore[no-untyped-call]
    return batch


def has_shards(x: ShardedBatch) -> bool:
    """Whether the parts are current: not once the joined tensor was written, or returned as memory to write."""
    return not x._memory.is_joined


def is_split_as(x: ShardedBatch, sizes: Sequence[int], devices: Sequence[torch.device], dim: int) -> bool:
    """Whether the parts are current, of these sizes and on these devices, so that nothing has to move."""
    layout = x._layout
    is_same = layout.sizes == tuple(sizes) and layout.devices == tuple(devices)
    return is_same and x.shard_dim == dim % x.ndim and has_shards(x)


def has_parts(x: ShardedBatch) -> bool:
    """Whether ``parts_of`` can return parts that keep the layout."""
    return x._layout.weights is not None or not x._memory.is_joined


def parts_of(x: ShardedBatch) -> tuple[Tensor, ...]:
    """Return the parts without a graph; results per replica also from the joined tensor, to keep their weights."""
    if not x._memory.is_joined:
        return x._parts
    cuts = split(joined_values(x), x._layout, x.shard_dim)
    return tuple(move(part, d) for part, d in zip(cuts, x._layout.devices))


def joined_values(x: ShardedBatch) -> Tensor:
    """Return the joined values without a graph, the same memory every time."""
    return x._joined.get()


def was_joined(x: ShardedBatch) -> bool:
    return x._kept is not None and x._kept.tensor is not None


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
    return tuple(move(part, d) for part, d in zip(split(joined, layout, dim), layout.devices))


# Below autograd.


def wrap(parts: Sequence[Tensor], layout: ShardLayout, dim: int) -> ShardedBatch:
    """Make a batch of parts that have no graph."""
    shape = list(parts[0].shape)
    shape[dim] = layout.num_rows
    is_inference = torch.is_inference_mode_enabled()
    return _new(shape, joined_strides(parts, shape, dim), 0, parts, layout, dim, is_inference, Memory(), None)


def wrap_view(
    base: ShardedBatch,
    place: tuple[Sequence[int], Sequence[int], int],
    parts: Sequence[Tensor],
    layout: ShardLayout,
    dim: int,
    view: Callable[[Tensor], Tensor],
) -> ShardedBatch:
    """Make a batch that shares its memory with another, given the same view of each of the base's parts.

    ``place`` is the view's shape, strides and offset in the base's memory; ``view`` makes it of the joined values.
    """
    base._memory.is_viewed = True
    joined, (shape, strides, offset) = base._joined, place
    make: Callable[[], Tensor] = lambda: view(joined.get())  # noqa: E731
    kept = JoinedValues(layout=layout, is_inference=joined.is_inference, make=make)
    offset += int(base.storage_offset())
    return _new(shape, strides, offset, parts, layout, dim, joined.is_inference, base._memory, kept)


def _new(
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    parts: Sequence[Tensor],
    layout: ShardLayout,
    dim: int,
    is_inference: bool,
    memory: Memory,
    kept: JoinedValues | None,
) -> ShardedBatch:
    with inference_mode(is_inference):
        batch: ShardedBatch = make_wrapper_subclass(
            ShardedBatch, shape, strides, offset, dtype=parts[0].dtype, device=layout.home
        )
    # C++ code that takes a pointer must fail rather than read from nowhere.
    throw_on_data_ptr(batch)
    # At once: each attribute that is set on its own takes 0.2 us.
    batch.__dict__.update(shard_dim=dim, _parts=tuple(parts), _layout=layout, _memory=memory, _kept=kept)
    return batch


class Join(torch.autograd.Function):
    """Connect a batch to its shards."""

    @staticmethod
    def forward(ctx: Any, layout: ShardLayout, dim: int, *shards: Tensor) -> ShardedBatch:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.dim = layout, dim
        return wrap([_materialize(s.detach()) for s in shards], layout, dim)

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
        ctx.like = [(p.shape, p.dtype, p.device) for p in x._parts]
        return tuple(p.detach() for p in x._parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all(g is None for g in grads):
            return None
        full = [torch.zeros(s, dtype=t, device=d) if g is None else g for g, (s, t, d) in zip(grads, ctx.like)]
        return Join.apply(ctx.layout, ctx.dim, *full)  # type: ignore[no-untyped-call]


def _materialize(x: Tensor) -> Tensor:
    """Allocate zeros without storage and resolve lazy conjugation, which ``__torch_dispatch__`` comes too late for."""
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x.resolve_conj().resolve_neg()
