"""What a model does before each forward, as one of several ranks' models."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everygpu.parallel.buckets.sizes import replica_bucket_bytes
from everygpu.parallel.ranks.gradients import RankGradients, check_hooks
from everygpu.parallel.ranks.start import copy_from_first
from everygpu.parallel.replicas.module_tree import ModuleTree
from everygpu.parallel.scatter.batch_weight import Weight, weigh_batch
from everygpu.ranks.group import Group
from everygpu.ranks.spread_batch import SpreadBatch, forward_of


class RankModel:
    """Keeps a model, and its gradients, equal on all ranks.

    Args:
        group: The ranks.
        dim: Where the rows of the batch are.
        num_devices: Of this rank.
        bucket_cap_mb: Size at which a bucket of gradients is closed, in MiB; None for the default.
        weight: Called with a batch, returns how much it counts beside other ranks'; its rows when left out.
        before: What was made for the same module before its options changed; backwards may still come to it.
    """

    def __init__(
        self,
        group: Group,
        dim: int,
        num_devices: int,
        bucket_cap_mb: float | None,
        weight: Weight | None,
        before: "RankModel | None" = None,
    ) -> None:
        self.group = group
        self._dim = dim
        self._num_devices = num_devices
        self._bucket_bytes = replica_bucket_bytes(bucket_cap_mb)
        self._weight = weight
        self._gradients: RankGradients | None = None if before is None else before._gradients
        self._is_held: bool = before is not None and before._is_held
        self._is_apart = False
        self._tree: ModuleTree | None = None

    def forward(self, function: Callable[..., Any], module: nn.Module, inputs: Any, kwargs: Any) -> Any:
        """Return a forward's output; layers compute over all ranks' batches, and gradients will be added up."""
        if self._is_apart:
            return function()
        if not torch.is_grad_enabled():
            with forward_of(SpreadBatch(self.group, 1.0)):
                return function()
        self.group.first_batch.compare(self.group, (inputs, kwargs))
        self.copy_buffers(module)
        weight = weigh_batch(
            self._weight,
            "DataParallel",
            inputs,
            kwargs,
            module=module,
            dim=self._dim,
            num_devices=self._num_devices,
        )
        weighed = self._begin_weighing(weight)
        with forward_of(SpreadBatch(self.group, self._later_weight(weight))):
            output = function()
        return weighed(output)

    def _later_weight(self, weight: float | Tensor) -> float | Tensor:
        """Return what gradients will be multiplied by after backward, beside other ranks'."""
        return weight

    def _begin_weighing(self, weight: float | Tensor) -> Callable[[Any], Any]:
        """Return what is called with a forward's output, and returns what gradients will come through."""
        gradients = self._current_gradients()

        def watch(output: Any) -> Any:
            gradients.watch(output, weight)
            return output

        return watch

    def _current_gradients(self) -> RankGradients:
        named = {name: p for name, p in self._params.items() if p.requires_grad}
        check_hooks(named)
        params = list(named.values())
        if self._gradients is None or not self._gradients.fits(params):
            self._gradients = RankGradients(self.group, params, self._bucket_bytes)
            self._gradients.is_held = self._is_held
        return self._gradients

    def copy_buffers(self, module: nn.Module) -> None:
        """Have all ranks begin with rank 0's buffers, in training: those that will be saved."""
        self._look_at(module)
        if module.training:
            copy_from_first(self.group, self._buffers)

    def _look_at(self, module: nn.Module) -> None:
        """Find the module's tensors anew where others have taken their places."""
        if self._tree is None or self._tree.modules[0] is not module or not self._tree.is_same():
            self._tree = ModuleTree(module)
            self._params, self._buffers = dict(module.named_parameters()), list(module.buffers())

    @contextlib.contextmanager
    def apart(self, module: nn.Module) -> Iterator[None]:
        """Leave gradients and buffers to the caller within, which weighs them by itself."""
        self._stand_aside(module)
        before, self._is_apart = self._is_apart, True
        try:
            with forward_of(SpreadBatch(self.group, 1.0)):
                yield
        finally:
            self._is_apart = before

    def _stand_aside(self, module: nn.Module) -> None:
        """Add up no gradients of the next backward."""
        self._gradients = None
        if torch.is_grad_enabled():
            self._look_at(module)
            check_hooks(self._params)
            self.group.last_forward = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of backwards within to the first one after it."""
        before = self._is_held
        self._hold(True)
        try:
            yield
        finally:
            self._hold(before)

    def _hold(self, is_held: bool) -> None:
        self._is_held = is_held
        if self._gradients is not None:
            self._gradients.is_held = is_held


def own_devices(group: Group | None) -> Sequence[int | str] | None:
    """Return the devices of a rank that names none: its own, unless it is the only one of its machine."""
    if group is None or group.local_size == 1:
        return None
    return [group.local_rank] if torch.cuda.is_available() else ["cpu"]
