"""A step whose gradients and update are on one device."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from everygpu.parallel.data_parallel import DataParallel
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
        return self._model(*inputs, **kwargs)

    def leaves(self) -> list[Tensor]:
        return []

    def begin(self) -> None:
        self._optimizer.zero_grad()

    def attach_grads(self) -> None:
        """Autograd finds them by itself."""

    def detach_grads(self) -> None:
        """They stay where the user may look at them."""

    def reduce(self) -> list[Share]:
        grads = [p.grad for p in all_params(self._optimizer) if p.grad is not None]
        return [Share(device=self._model.replica_devices[0], grads=grads)]

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
