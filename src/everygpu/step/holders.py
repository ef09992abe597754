"""Who holds the gradients of a training step, and applies them."""

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.placement import place_module
from everygpu.parallel.replicate import Leaves, ReplicaSet
from everygpu.step.arena import Arena
from everygpu.step.sharded_optimizer import ShardedOptimizer
from everygpu.step.shards import Shards
from everygpu.step.update import Share, is_fused


class Holder(Protocol):
    """Where backward puts the gradients, and what becomes of them."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model on all devices."""

    def begin(self) -> None:
        """Start with no gradients."""

    def lend(self) -> None:
        """Prepare for a backward."""

    def withdraw(self) -> None:
        """Clean up after a backward."""

    def reduce(self) -> list[Share]:
        """Add the gradients of all replicas up, and return each device's part."""

    def apply(self, found_inf: Tensor | None) -> None:
        """Step the optimizer; not at all where ``found_inf`` is not 0."""

    def refresh(self) -> None:
        """Send the parameters to every device."""


class WholeHolder:
    """Gradients are the parameters' own, on the primary device, and the optimizer is the stock one.

    So it is on one device, and with optimizers that can't be sharded.
    """

    def __init__(self, model: DataParallel, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._model(*inputs, **kwargs)

    def begin(self) -> None:
        self._optimizer.zero_grad()

    def lend(self) -> None:
        """Autograd finds them by itself."""

    def withdraw(self) -> None:
        """They stay where the user may look at them."""

    def reduce(self) -> list[Share]:
        grads = [p.grad for p in _params(self._optimizer) if p.grad is not None]
        return [Share(device=self._model.device_ids[0], grads=grads)]

    def apply(self, found_inf: Tensor | None) -> None:
        optimizer: Any = self._optimizer
        if found_inf is None:
            optimizer.step()
        elif is_fused(optimizer):
            optimizer.found_inf = found_inf
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf
        elif not found_inf.item():
            optimizer.step()

    def refresh(self) -> None:
        """DataParallel does so at every forward."""


class ShardedHolder:
    """Each device holds, reduces and updates its share."""

    def __init__(self, model: DataParallel, optimizer: ShardedOptimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._arena: Arena | None = None
        self._shards: Shards | None = None
        self._replicas: ReplicaSet | None = None
        self._touched: set[int] = set()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._settled()[0].follow_edits()
        if len(self._model.device_ids) == 1:
            return self._model(*inputs, **kwargs)
        if self._replicas is None or self._replicas.module is not self._model.module:
            self._replicas = self._model.make_replicas(self._make_leaves)
        return self._model.forward_with(self._replicas, *inputs, **kwargs)

    def begin(self) -> None:
        self._settled()[0].begin()

    def lend(self) -> None:
        self._settled()[0].lend_grads()

    def withdraw(self) -> None:
        self._settled()[0].withdraw_grads()

    def reduce(self) -> list[Share]:
        arena, _ = self._settled()
        self._touched = arena.touched()
        arena.reduce()
        columns = zip(*arena.chunks(arena.grads))
        return [Share(device=d, grads=list(chunks)) for d, chunks in zip(arena.devices, columns)]

    def apply(self, found_inf: Tensor | None) -> None:
        arena, shards = self._settled()
        with torch.no_grad():
            if found_inf is None or shards.is_fused():
                self._optimizer.run(shards, self._touched, found_inf)
            elif not found_inf.item():
                self._optimizer.run(shards, self._touched)
        arena.hand_out()

    def refresh(self) -> None:
        arena, _ = self._settled()
        arena.adopt()

    def _settled(self) -> tuple[Arena, Shards]:
        """Return the memory and the optimizers on it, made anew when the parameters have changed in kind."""
        params = [p for p in _params(self._optimizer) if p.requires_grad]
        if self._arena is None or not self._arena.fits(params):
            model = self._model
            place_module(model.module, model.device_ids[0], "TrainStep", strict=model.strict_device)
            self._arena = Arena(params, model.device_ids)
            self._shards = self._replicas = None
        if self._shards is None or not self._optimizer.holds(self._shards):
            arena = self._arena
            values, grads = arena.chunks(arena.values), arena.chunks(arena.grads)
            self._shards = Shards(self._optimizer.module, arena.params, arena.plans, values, grads)
            self._optimizer.attach(arena.params, self._shards)
        return self._arena, self._shards

    def _make_leaves(self) -> Leaves:
        arena, _ = self._settled()
        arena.adopt()
        return {id(p): [twins[i] for twins in arena.twins] for i, p in enumerate(arena.params)}


def _params(optimizer: Optimizer) -> Iterator[Any]:
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
