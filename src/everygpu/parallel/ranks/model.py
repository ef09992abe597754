"""What a model does before each forward, as one of several ranks' models."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from everygpu.parallel.buckets.sizes import replica_bucket_bytes
from everygpu.parallel.ranks.gradients import RankGradients
from everygpu.parallel.ranks.start import copy_from_first
from everygpu.parallel.scatter.batch_weight import Weight, weigh_batch
from everygpu.ranks.claims import Claim
from everygpu.ranks.group import Group
from everygpu.ranks.spread_batch import SpreadBatch, forward_of
from everygpu.torch_private.autograd import NO_BACKWARD, backward_id


class RankModel:
    """Keeps a model, and its gradients, equal on all ranks.

    Args:
        group: The ranks.
        dim: Where the rows of the batch are.
        num_devices: Of this rank.
        bucket_cap_mb: Size at which a bucket of gradients is closed, in MiB; None for the default.
        weight: Called with a batch, returns how much it counts beside other ranks'; its rows when left out.
    """

    def __init__(
        self, group: Group, dim: int, num_devices: int, bucket_cap_mb: float | None, weight: Weight | None
    ) -> None:
        self.group = group
        self._dim = dim
        self._num_devices = num_devices
        self._bucket_bytes = replica_bucket_bytes(bucket_cap_mb)
        self._weight = weight
        self._gradients: RankGradients | None = None
        self._is_apart = False
        self._claim_apart = Claim()
        self._last_weight: float | Tensor = 1.0

    @contextlib.contextmanager
    def forward(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Have layers within compute over all ranks' batches, and the gradients be added up; tell ranks of an error."""
        if self._is_apart:
            yield
            return
        with self._telling(module):
            self._begin(module, inputs, kwargs)
            with forward_of(SpreadBatch(self.group, self._last_weight)):
                yield

    def _telling(self, module: nn.Module) -> AbstractContextManager[None]:
        if backward_id() != NO_BACKWARD:  # a checkpoint computes again, and ends that by an exception of its own
            return contextlib.nullcontext()
        return self.group.telling(next((p.device for p in module.parameters()), None))

    def watch(self, output: Any) -> Any:
        """Return a forward's output, once backwards through it are noticed."""
        if self._gradients is not None and torch.is_grad_enabled() and not self._is_apart:
            self._gradients.watch(output)
        return output

    def _begin(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        self.group.first_batch.compare(self.group, (inputs, kwargs))
        self.copy_buffers(module)
        params = [p for p in module.parameters() if p.requires_grad]
        if self._gradients is None or not self._gradients.fits(params):
            self.close()
            self._gradients = RankGradients(self.group, params, self._bucket_bytes)
        self._last_weight = self._weight_of(inputs, kwargs)
        self._gradients.weigh(self._last_weight)

    def copy_buffers(self, module: nn.Module) -> None:
        """Have all ranks begin with rank 0's buffers, in training: those that will be saved."""
        if module.training:
            copy_from_first(self.group, list(module.buffers()))

    def _weight_of(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> float | Tensor:
        return weigh_batch(self._weight, "DataParallel", inputs, kwargs, dim=self._dim, num_devices=self._num_devices)

    @contextlib.contextmanager
    def apart(self, module: nn.Module) -> Iterator[None]:
        """Leave gradients and buffers to the caller within, which weighs them by itself."""
        self.close()
        if torch.is_grad_enabled():
            self.group.claims.take(self._claim_apart, module.parameters())
        before, self._is_apart = self._is_apart, True
        try:
            with forward_of(SpreadBatch(self.group, 1.0)):
                yield
        finally:
            self._is_apart = before

    def close(self) -> None:
        """Leave gradients alone."""
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None


def own_devices(group: Group | None) -> Sequence[int | str] | None:
    """Return the devices of a rank that names none: its own, unless it is the only one of its box."""
    if group is None or group.local_size == 1:
        return None
    return [group.local_rank] if torch.cuda.is_available() else ["cpu"]
