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
from everygpu.step.fused import FusedUpdate, can_fuse
from everygpu.step.sharded_optimizer import ShardedOptimizer
from everygpu.step.shards import Shards
from everygpu.step.update import Share, is_fused


class Holder(Protocol):
    """Where backward puts the gradients, and what becomes of them."""

    def prepare(self) -> None:
        """Take note of what has changed since the last step."""

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

    def fuse(self, factor: float) -> bool:
        """Reduce, multiply by a factor and apply in one go; or do nothing and return False."""

    def refresh(self) -> None:
        """Send the parameters to every device."""


class WholeHolder:
    """Gradients are the parameters' own, on the primary device, and the optimizer is the stock one.

    So it is on one device, and with optimizers that can't be sharded.
    """

    def __init__(self, model: DataParallel, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def prepare(self) -> None:
        """DataParallel does so at every forward."""

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

    def fuse(self, factor: float) -> bool:
        return False

    def refresh(self) -> None:
        """DataParallel does so at every forward."""


class ShardedHolder:
    """Each device holds, reduces and updates its share."""

    def __init__(self, model: DataParallel, optimizer: ShardedOptimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._replicas: ReplicaSet | None = None
        self._touched: set[int] = set()
        self._arrange(self._trainable())

    def prepare(self) -> None:
        params = self._trainable()
        if not self._arena.fits(params):
            self._arrange(params)
        elif not self._optimizer.holds(self._shards):
            self._attach()
        self._arena.follow_edits()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if len(self._model.device_ids) == 1:
            return self._model(*inputs, **kwargs)
        if self._replicas is None or self._replicas.module is not self._model.module:
            self._replicas = self._model.make_replicas(self._make_leaves)
        return self._model.forward_with(self._replicas, *inputs, **kwargs)

    def begin(self) -> None:
        self._arena.begin()

    def lend(self) -> None:
        self._arena.lend_grads()

    def withdraw(self) -> None:
        self._arena.withdraw_grads()

    def reduce(self) -> list[Share]:
        self._touched = self._arena.touched()
        self._arena.reduce()
        columns = zip(*self._arena.chunks(self._arena.grads))
        return [Share(device=d, grads=list(chunks)) for d, chunks in zip(self._arena.devices, columns)]

    def apply(self, found_inf: Tensor | None) -> None:
        if self._fused is not None and found_inf is None:
            self._run_fused(self._fused, factor=1.0, is_reduced=True)
            return
        if found_inf is None or self._shards.is_fused() or not found_inf.item():
            on_device = found_inf if self._shards.is_fused() else None
            groups = self._optimizer.param_groups
            with torch.no_grad():
                self._optimizer.run(lambda: self._shards.step(groups, self._touched, on_device))
        self._arena.hand_out()

    def fuse(self, factor: float) -> bool:
        if self._fused is None:
            return False
        self._touched = self._arena.touched()
        self._run_fused(self._fused, factor=factor, is_reduced=False)
        return True

    def refresh(self) -> None:
        self.prepare()
        self._arena.adopt()

    def _trainable(self) -> list[Tensor]:
        return [p for p in _params(self._optimizer) if p.requires_grad]

    def _arrange(self, params: list[Tensor]) -> None:
        """Make memory for the parameters as they are now."""
        model = self._model
        place_module(model.module, model.device_ids[0], "TrainStep", strict=model.strict_device)
        self._arena = Arena(params, model.device_ids)
        self._replicas = None
        self._attach()

    def _attach(self) -> None:
        """Have the optimizer's state where the gradients are."""
        arena = self._arena
        values, grads = arena.chunks(arena.values), arena.chunks(arena.grads)
        self._shards = Shards(self._optimizer.module, arena.params, arena.plans, values, grads)
        self._optimizer.attach(arena.params, self._shards)
        stock = self._optimizer.module
        self._fused = FusedUpdate(stock, arena, self._shards) if can_fuse(stock, arena) else None

    def _run_fused(self, fused: FusedUpdate, *, factor: float, is_reduced: bool) -> None:
        with torch.no_grad():
            self._optimizer.run(lambda: fused.run(self._touched, factor=factor, is_reduced=is_reduced))
        self._arena.note_update()

    def _make_leaves(self) -> Leaves:
        self._arena.adopt()
        return {id(p): [twins[i] for twins in self._arena.twins] for i, p in enumerate(self._arena.params)}


def _params(optimizer: Optimizer) -> Iterator[Any]:
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
