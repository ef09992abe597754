"""A step whose gradients and update are on one device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from everygpu.parallel.buckets.kept import KeptBucket
from everygpu.parallel.buckets.sizes import UPDATE_BYTES
from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.ranks.gradients import make_buckets
from everygpu.ranks.group import Group
from everygpu.step.shards import all_params
from everygpu.step.update import Share, is_fused


class LocalUpdate:
    """Gradients are the parameters' own, on the primary device, and the optimizer is the stock one.

    So it is on one device, and with optimizers that can't be sharded.
    """

    def __init__(self, model: DataParallel, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def prepare(self) -> None:
        """DataParallel does so at every forward."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        ranks = self._model.rank_model  # another one after a release
        with nullcontext() if ranks is None else ranks.apart(self._model.module):  # the step weighs ranks' losses
            return self._model(*inputs, **kwargs)

    def leaves(self) -> list[Tensor]:
        return []

    def begin(self) -> None:
        self._optimizer.zero_grad()

    def attach_grads(self) -> None:
        """Autograd finds them by itself."""

    def detach_grads(self) -> None:
        """They stay where the user may look at them."""

    def adding_up(self, *, is_only: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def flags(self) -> None:
        return None

    def take_flags(self, flags: Tensor | None) -> None:
        """Buckets bring them along."""

    def reduce(self) -> list[Share]:
        if self._model.rank_model is not None:
            _add_up_ranks(self._model.rank_model.group, list(all_params(self._optimizer)))
        grads = [p.grad for p in all_params(self._optimizer) if p.grad is not None]
        return [Share(device=self._model.replica_devices[0], grads=grads)]

    def apply(self, found_inf: Tensor | None, *, is_common: bool = True) -> None:
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

    def fuse(self, factor: float | Tensor, losses: Tensor | None) -> None:
        return None

    def uncount(self, counted: set[int]) -> None:
        """The optimizer counts its updates itself."""

    def refresh(self) -> None:
        """DataParallel does so at every forward."""

    def kept(self) -> list[KeptBucket]:
        return []  # replicas' copies are written anew before each forward


def _add_up_ranks(group: Group, params: list[Tensor]) -> None:
    """Add gradients up over ranks; a parameter that only others have a gradient of gets theirs."""
    buckets = make_buckets(params, UPDATE_BYTES)
    for bucket in buckets:
        bucket.send(group)
    for bucket in buckets:
        bucket.finish()
