"""The update of a model that is shared out over ranks: gradients and states are where the parameters' rows are."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.fully_sharded.shards import is_shard, local_part, replicated
from everygpu.ranks.group import Group
from everygpu.step.sharded_update import ShardedUpdate
from everygpu.step.shards import all_params
from everygpu.step.update import Shares, multiply, step_unless, total_norm


class FullyShardedUpdate(ShardedUpdate):
    """Takes the gradients that FSDP2 has averaged over ranks, each rank its own rows of them.

    Args:
        model: Shared out.
        group: Its ranks.
        optimizer: A stock one, of its parameters.
    """

    def __init__(self, model: DataParallel, group: Group, optimizer: Optimizer) -> None:
        super().__init__(model, optimizer)
        self._ranks, self._group = group, None  # which adds up nothing

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model in its own precision; the loss alone is computed under autocast."""
        with torch.autocast(self._model.replica_devices[0].type, enabled=False):
            return super().forward(*inputs, **kwargs)

    def reduce(self) -> Shares:
        """Return this rank's rows of the sum of all ranks' gradients."""
        parts = [local_part(p.grad) for p in all_params(self._optimizer) if p.grad is not None]
        grads = [part for part in parts if part.numel()]
        shares = [grads] if grads else []
        multiply(shares, float(self._ranks.size))  # FSDP2 has divided by it
        return shares

    def norm(self, shares: Shares) -> Tensor:
        """Return the norm of all ranks' gradients as one vector, shape ()."""
        squared = total_norm(shares, self._model.replica_devices[0]).square()
        self._ranks.all_reduce(squared)()
        return squared.sqrt()

    def apply(self, found_inf: Tensor | None) -> None:
        """Step the optimizer; not where ``found_inf``, of shape () and the same on all ranks, isn't 0."""
        updated = [p for p in all_params(self._optimizer) if p.grad is not None]
        like = next((p for p in updated if is_shard(p)), None)
        if found_inf is not None and like is not None:
            found_inf = replicated(found_inf, like)
        step_unless(found_inf, self._optimizer, updated)
