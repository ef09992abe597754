"""All ranks start from rank 0's model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from everygpu.devices.parse import may_share_gpus
from everygpu.errors import DeviceError
from everygpu.parallel.buckets.plan import group_tensors
from everygpu.parallel.buckets.sizes import REPLICA_BYTES
from everygpu.ranks.group import Group
from everygpu.torch_private.core import foreach_copy_


def start_alike(group: Group, module: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    copy_from_first(group, check_alike(group, module))


def check_alike(group: Group, module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module of which every rank has one.

    Raises:
        RankError: on every rank, if the ranks' modules differ in names, shapes or dtypes; the message names the first.
    """
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    rows = {name: (tuple(t.shape), str(t.dtype)) for name, t in named.items()}
    group.check_same("parameters and buffers of the model", rows)
    return list(named.values())


def check_devices(group: Group, devices: Sequence[torch.device]) -> None:
    """Refuse ranks that share a GPU: NCCL can't have two of them there, and says so late and in words of its own."""
    mine = [str(torch.cuda.get_device_properties(d).uuid) for d in devices if d.type == "cuda"]
    if not group.uses_nccl or may_share_gpus():
        mine = []
    of_ranks: dict[str, list[int]] = {}
    for rank, found in enumerate(group.gather(mine)):
        for uuid in found:
            of_ranks.setdefault(uuid, []).append(rank)
    shared = next((ranks for ranks in of_ranks.values() if len(ranks) > 1), None)
    if shared is not None:
        raise DeviceError(
            f"DataParallel: every rank must have GPUs of its own, got one on ranks {shared[0]} and {shared[1]}. Leave "
            f"device_ids out, or pass [int(os.environ['LOCAL_RANK'])]."
        )


@torch.no_grad()
def copy_from_first(group: Group, tensors: Sequence[Tensor]) -> None:
    """Write rank 0's values into the other ranks' tensors."""
    for indices in group_tensors(tensors, lambda t: (t.dtype, t.device), REPLICA_BYTES):
        members = [tensors[i] for i in indices]
        flat = torch.cat([t.reshape(-1) for t in members])
        group.broadcast(flat)
        if group.rank:
            parts = torch.split(flat, [t.numel() for t in members])
            foreach_copy_(members, [part.view(t.shape) for part, t in zip(parts, members)])
