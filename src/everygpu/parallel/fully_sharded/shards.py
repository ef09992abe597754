"""Tensors of which each rank has some rows: which they are, the whole of one, and a rank's part of a whole."""

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
    """Return a tensor with all ranks' rows, on its device; all ranks call it."""
    whole: Tensor = x.detach().full_tensor()  # type: ignore[attr-defined]
    return whole


def local_if_single(x: Tensor) -> Tensor:
    """Return a tensor as it is, but an ordinary one where no other rank has rows of it."""
    return x.to_local() if is_shard(x) and x.device_mesh.size() == 1 else x  # type: ignore[attr-defined]


def local_part(x: Tensor) -> Tensor:
    """Return the rows that this rank has, which share memory with the tensor."""
    return x.to_local() if is_shard(x) else x  # type: ignore[attr-defined]


def shard_like(whole: Tensor, x: Any) -> Tensor:
    """Return this rank's rows of a tensor that it has whole, spread as ``x`` is."""
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
    """Put this rank's parts in the places of whole tensors in a state dict, where its own state has such."""
    for name, value in own.items():
        if is_shard(value) and isinstance(state.get(name), Tensor) and not is_shard(state[name]):
            state[name] = shard_like(state[name], value)


def replicated(x: Tensor, like: Any) -> Tensor:
    """Show a tensor that is the same on all ranks as torch wants it beside those that are shared out."""
    from torch.distributed.tensor import DTensor, Replicate

    made: Tensor = DTensor.from_local(x, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return made
