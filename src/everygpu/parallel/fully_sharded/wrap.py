"""A model sharded over ranks by torch's FSDP2: every rank has some rows of each parameter."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from everygpu.devices.seed import spread_seeds
from everygpu.errors import CallError
from everygpu.parallel.fully_sharded.options import (
    PRECISIONS,
    Groups,
    OldParameters,
    Sharding,
    check_groups,
    check_tensors,
    find_groups,
    num_parameters,
    refuse_steps,
)
from everygpu.parallel.ranks import check_equal_on_ranks, copy_from_first
from everygpu.ranks.group import Group

logger = logging.getLogger("everygpu")


def share_out(group: Group, module: nn.Module, device: torch.device, sharding: Sharding) -> OldParameters:
    """Leave each rank its rows of rank 0's parameters, on its device; no rank has more than one group whole there.

    Classes are swapped in place, so names stay. Parameters on the meta device get values by ``reset_parameters`` of
    their modules; otherwise they are nan, to be filled by a checkpoint. An optimizer that has the parameters which were
    there before is refused.
    """
    check_tensors(module)
    groups = find_groups(module, sharding.wrap)
    check_groups(module, groups)
    check_equal_on_ranks(group, module)
    _report(module, groups, group.size)
    old = OldParameters(module)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or the mesh would take that of LOCAL_RANK
    mesh = init_device_mesh(device.type, (group.size,))
    apply(module, groups, sharding, mesh, device, prepare=partial(copy_from_first, group))
    fill(module, device)
    old.check()
    refuse_steps()
    return old


def apply(
    module: nn.Module,
    groups: Groups,
    sharding: Sharding,
    mesh: DeviceMesh,
    device: torch.device,
    prepare: Callable[[Sequence[Tensor]], object] = lambda tensors: None,
) -> None:
    """Put each group on the device, at last the root, call ``prepare`` with its tensors, and then ``fully_shard``."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    prepare_blocks(module, groups, sharding)
    order = {id(m): i for i, m in enumerate(module.modules())}
    last = max((order[id(block)] for block in groups.blocks), default=0)
    for part in (*groups, module):
        dtype = next((p.dtype for p in part.parameters() if p.requires_grad and p.is_floating_point()), torch.float32)
        policy = MixedPrecisionPolicy(
            param_dtype=PRECISIONS[sharding.precision],
            reduce_dtype=torch.promote_types(dtype, torch.float32),  # its default isn't that of all versions of torch
        )
        # What comes after the blocks is the first that backward needs: as torch's own rule for the root.
        is_tail = part is module or (part not in groups.blocks and order[id(part)] > last)
        prepare(_place(part, device))
        fully_shard(
            part, mesh=mesh, mp_policy=policy, reshard_after_forward=sharding.level == "parameters" and not is_tail
        )


def prepare_blocks(module: nn.Module, groups: Groups, sharding: Sharding) -> None:
    """Checkpoint the activations of blocks, and compile them, in this order, before they are sharded.

    A model of ``transformers`` knows by itself how its caches go with that.
    """
    names = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # the second up to transformers 5
    enable: Any = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    for block in groups.blocks:
        if sharding.checkpoints and enable is None:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if sharding.compiles:
            block.forward = torch.compile(block.forward)
    if sharding.checkpoints and enable is not None:
        enable({"use_reentrant": False})


def _report(module: nn.Module, groups: Groups, size: int) -> None:
    total, shared = num_parameters(module), sum(map(num_parameters, groups))
    logger.info("DataParallel: %d parameters over %d ranks, in %d groups.", total, size, len(tuple(groups)) + 1)
    if total and shared * 2 < total:
        logger.warning(
            "DataParallel: no blocks were found for %d of %d parameters, so each rank has them whole while the model "
            "runs. Pass wrap=[...] with the classes of its blocks.",
            total - shared,
            total,
        )


@torch.no_grad()
def _place(part: nn.Module, device: torch.device) -> list[Tensor]:
    """Move what isn't sharded to the device, and return it."""
    from torch.distributed.tensor import DTensor

    tensors = [t for t in (*part.parameters(), *part.buffers()) if not isinstance(t, DTensor) and not t.is_meta]
    for t in tensors:
        t.data = t.data.to(device, memory_format=torch.contiguous_format)
    return tensors


@torch.no_grad()
def fill(module: nn.Module, device: torch.device) -> None:
    """Give what is on the meta device memory and values."""
    empty = []
    for name, child in module.named_modules():
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        are_all = all(t.is_meta for t in own)  # before others take their places
        if not any(t.is_meta for t in own):
            continue
        child._apply(lambda t: _unfilled(t, device) if t.is_meta else t.clone(), recurse=False)
        spread_seeds([device])
        reset: Any = getattr(child, "reset_parameters", None)
        if reset is not None and are_all:
            reset()
        else:
            empty.append(name)
    if empty:
        logger.warning(
            "DataParallel: %d modules came from the meta device and have no reset_parameters, such as %r: they are nan "
            "until everygpu.load(path, model=model), or code of yours, fills them.",
            len(empty),
            empty[0],
        )


def _unfilled(t: Tensor, device: torch.device) -> Tensor:
    made = torch.empty_like(t, device=device)
    return made.fill_(float("nan")) if t.is_floating_point() else made.zero_()


@contextmanager
def explaining_parts() -> Iterator[None]:
    """Say what it means that a computation within finds a part of a parameter."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise CallError(
            "DataParallel: a parameter is used while it is sharded: outside of the forward of the block that has "
            "it, as embedding.weight or block.attention called from elsewhere. Pass wrap=[...] with the classes whose "
            "forward uses their parameters themselves; the rest is whole during the whole forward."
        ) from error


def reshard(module: nn.Module) -> None:
    """Free what a forward without a backward has left whole, so that ``parameters()`` are those that train."""
    from torch.distributed.fsdp import FSDPModule

    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()
