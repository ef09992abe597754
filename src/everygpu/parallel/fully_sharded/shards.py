"""Tensors that are sharded by rows over ranks: tests, the full tensor, and a rank's shard."""

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def is_shard(x: Any) -> bool:
    """Whether a tensor is sharded over ranks: torch's DTensor, recognized without importing it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def full_tensor(x: Tensor) -> Tensor:
    """Gather a full tensor on its device; all ranks call it."""
    whole: Tensor = x.detach().full_tensor()  # type: ignore[attr-defined]
    return whole


def local_if_single(x: Tensor) -> Tensor:
    """Return the local tensor of a shard on a single rank, and any other tensor unchanged."""
    return x.to_local() if is_shard(x) and x.device_mesh.size() == 1 else x  # type: ignore[attr-defined]


def local_part(x: Tensor) -> Tensor:
    """Return this rank's rows, which share memory with the tensor."""
    return x.to_local() if is_shard(x) else x  # type: ignore[attr-defined]


def shard_like(whole: Tensor, x: Any) -> Tensor:
    """Shard a full tensor as ``x`` is sharded."""
    from torch.distributed.tensor import DTensor, Shard

    local = whole.detach()
    for placement, size, rank in zip(x.placements, x.device_mesh.shape, x.device_mesh.get_coordinate()):
        if isinstance(placement, Shard):
            rows = -(-local.shape[placement.dim] // size)
            begin = min(rank * rows, local.shape[placement.dim])
            local = local.narrow(placement.dim, begin, min(rows, local.shape[placement.dim] - begin))
    local = local.to(x.device, copy=True, memory_format=torch.contiguous_format)
    made: Tensor = DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )
    return made


def shard_state(state: MutableMapping[str, Any], own: Mapping[str, Any]) -> None:
    """Shard the full tensors in a state dict wherever the own state has shards."""
    for name, value in own.items():
        if is_shard(value) and isinstance(state.get(name), Tensor) and not is_shard(state[name]):
            state[name] = shard_like(state[name], value)


def replicated(x: Tensor, like: Any) -> Tensor:
    """Return a tensor that is equal on all ranks as a DTensor, as torch needs it together with shards."""
    from torch.distributed.tensor import DTensor, Replicate

    made: Tensor = DTensor.from_local(x, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return made
