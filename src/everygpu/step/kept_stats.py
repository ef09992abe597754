"""Running statistics of a batch whose loss is not finite: they are put back as they were."""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor, nn

from everygpu import comm
from everygpu.torch_private.tensors import foreach_copy_

_NAMES = ("running_mean", "running_var")


class _Group(NamedTuple):
    """Statistics of one dtype and device."""

    tensors: list[Tensor]
    before: Tensor
    """As they were, side by side."""


class KeptStats:
    """The running statistics of normalization layers as they were before a forward.

    Args:
        module: Whose layers count that are in training mode.
    """

    @torch.no_grad()
    def __init__(self, module: nn.Module) -> None:
        found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for t in _running_stats(module):
            found[t.dtype, t.device].append(t)
        self._groups = [_Group(tensors, _join(tensors)) for tensors in found.values()]

    @torch.no_grad()
    def put_back_unless_finite(self, loss: Tensor) -> None:
        """Put all back where a loss, of shape (), isn't finite; without waiting for it."""
        for tensors, before in self._groups:
            is_finite = comm.copy(loss.detach(), before.device) * 0 == 0  # isfinite launches twice as many kernels
            chosen = torch.where(is_finite, _join(tensors), before)
            # Through .data, as batch_norm itself does: the version stays, so backward accepts what forward saved.
            foreach_copy_([t.data for t in tensors], _split(chosen, tensors))


def _running_stats(module: nn.Module) -> list[Tensor]:
    # In each step that isn't launched as recorded: asking modules for attributes that they lack takes long.
    found = [m._buffers.get(name) for m in module.modules() if m.training for name in _NAMES]
    return [t for t in found if isinstance(t, Tensor) and t.is_floating_point() and t.layout is torch.strided]


def _join(tensors: list[Tensor]) -> Tensor:
    joined = torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    foreach_copy_(_split(joined, tensors), tensors)
    return joined


def _split(joined: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return [part.view(t.shape) for part, t in zip(torch.split(joined, [t.numel() for t in tensors]), tensors)]
