"""``retain_grad`` and hooks on outputs whose gradients also come from other outputs, inside the replicas."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from everygpu.errors import CallError
from everygpu.parallel.sharded.batch import Join, ShardedBatch, shards_of
from everygpu.parallel.sharded.dispatch import Args, Kwargs
from everygpu.torch_private.core import after_backward, without_torch_function

_ALIAS, _RECORDED = "everygpu_alias", "everygpu_recorded"


def mark_alias(node: Any, on_watch: Callable[[], None]) -> None:
    """Say of a node that it is a view that stands for its base, and what to call when gradients there are watched."""
    node.metadata[_ALIAS] = on_watch


def mark_recorded(node: Any) -> None:
    """Say of a node that it is a launch of several outputs, which knows no gradients between them."""
    node.metadata[_RECORDED] = True


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
        if any(shard is not None and _RECORDED in shard.metadata for shard, _ in shards):
            raise CallError(
                f"{name}: this output came from a recorded forward, which knows no gradients between its outputs. "
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
    """Return the node, and which of its outputs, that an alias stands for."""
    while node is not None and _ALIAS in node.metadata:
        node.metadata[_ALIAS]()
        node, place = node.next_functions[0]
    return node, place
