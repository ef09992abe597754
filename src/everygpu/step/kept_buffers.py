"""Running statistics of normalisation layers, put back where the batch's loss is not finite."""

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from everygpu import comm
from everygpu.torch_private.modules import NormBase
from everygpu.torch_private.tensors import foreach_copy_

Kept = list[tuple[list[Tensor], Tensor]]
"""Statistics of one dtype and device, and side by side their values before a forward."""


@torch.no_grad()
def keep_statistics(roots: Iterable[nn.Module], devices: Collection[torch.device]) -> Kept:
    """Copy the statistics of layers in training mode, on the devices: elsewhere something would wait for the loss."""
    layers = [m for root in roots for m in root.modules() if isinstance(m, NormBase) and m.training]
    found = {id(t): t for m in layers for t in (m.running_mean, m.running_var) if t is not None}
    groups = defaultdict(list)
    for t in found.values():
        if t.device in devices:
            groups[t.dtype, t.device].append(t)
    return [(tensors, torch.cat(tensors)) for tensors in groups.values()]


@torch.no_grad()
def put_back_unless_finite(kept: Kept, loss: Tensor) -> None:
    """Put all back where a loss, of shape (), isn't finite; without waiting for it."""
    for tensors, before in kept:
        is_finite = comm.copy(loss.detach(), before.device) * 0 == 0  # isfinite launches twice as many kernels
        torch.where(is_finite, torch.cat(tensors), before, out=before)
        # Through .data, as batch_norm itself does: the version stays, so backward accepts what forward saved.
        foreach_copy_([t.data for t in tensors], torch.split(before, [t.numel() for t in tensors]))
