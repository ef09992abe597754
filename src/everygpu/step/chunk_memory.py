"""Memory for a sharded optimizer in an ordinary loop, where parameters and gradients stay on the primary device."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from everygpu import comm
from everygpu.errors import OptimizerError
from everygpu.parallel.buckets.plan import plan_buckets
from everygpu.parallel.buckets.sizes import update_bucket_bytes
from everygpu.step.parameter_checks import check_memory
from everygpu.step.shards import Shards
from everygpu.torch_private.tensors import foreach_copy_


class ChunkMemory:
    """Each device's chunks, where parameters and gradients are on the primary device."""

    def __init__(self, params: Sequence[Tensor], devices: Sequence[torch.device], bucket_cap_mb: float | None) -> None:
        check_memory(params)
        self.params = list(params)
        self._known = [_shape_of(p) for p in params]
        self.plans = plan_buckets(params, len(devices), update_bucket_bytes(params, bucket_cap_mb))
        self.values = [[plan.make_chunk(d) for d in devices] for plan in self.plans]
        self.grads = [[plan.make_chunk(d) for d in devices] for plan in self.plans]

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Tell whether these are the parameters it was made for, of the same shapes and dtypes."""
        return len(params) == len(self.params) and all(
            p is mine and _shape_of(p) == known for p, mine, known in zip(params, self.params, self._known)
        )

    def load(self, tensors: Sequence[Tensor | None], chunks: Sequence[Sequence[Tensor]]) -> None:
        """Copy tensors, shaped as the parameters, to the chunks; zeros where there is None."""
        found = dict(enumerate(tensors))
        for plan, targets in zip(self.plans, chunks):
            home = self.params[plan.slots[0].index].device
            comm.scatter(plan.flatten(found, home), targets)

    def store(self) -> None:
        """Copy the chunks' values to the parameters."""
        for plan, sources in zip(self.plans, self.values):
            members = [self.params[slot.index] for slot in plan.slots]
            flat = torch.empty(plan.numel, dtype=plan.dtype, device=members[0].device)
            comm.gather(sources, flat)
            foreach_copy_(members, plan.views(flat))


class ChunkShards(Shards):
    """Shards whose memory is the devices' own chunks."""

    def __init__(self, optimizer: Optimizer, memory: ChunkMemory) -> None:
        super().__init__(optimizer, memory.params, memory.plans, memory.values, memory.grads)
        self.memory = memory

    def step_alone(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Update the parameters from their gradients, both on the primary device.

        Raises:
            OptimizerError: a gradient is sparse.
        """
        memory = self.memory
        grads = [p.grad for p in memory.params]
        for index, grad in enumerate(grads):
            if grad is not None and grad.layout != torch.strided:
                raise OptimizerError(
                    f"ShardedOptimizer: gradients must be dense, got a sparse one for parameter {index} of shape "
                    f"{tuple(memory.params[index].shape)}. Use the stock optimizer, or sparse=False."
                )
        memory.load(memory.params, memory.values)
        memory.load(grads, memory.grads)
        try:
            self.step(options, {i for i, g in enumerate(grads) if g is not None})
        finally:  # as the stock optimizer, interrupted, leaves what it has done
            memory.store()


def _shape_of(p: Tensor) -> tuple[Any, ...]:
    return p.shape, p.dtype, p.device, p.stride(), p.requires_grad
