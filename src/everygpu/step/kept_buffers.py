"""Buffers that a forward may write, such as running statistics: put back where the batch's loss is not finite."""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from everygpu import comm
from everygpu.torch_private.tensors import foreach_copy_

MAX_BYTES = 64 * 2**20
"""Of what is kept, the smallest buffers first."""


Place = tuple[dict[str, Tensor | None], str, Tensor]
"""A module's table, a buffer's name in it, and the buffer."""


class KeptBuffers(NamedTuple):
    """Buffers of one dtype and device, as they were before a forward."""

    places: list[Place]
    before: Tensor
    """Side by side."""


@torch.no_grad()
def keep_buffers(roots: Iterable[nn.Module], devices: Collection[torch.device]) -> list[KeptBuffers]:
    """Copy the floating-point buffers of modules in training mode, and of those below them.

    Torch's version counters don't tell which a forward writes, as writes through ``.data`` don't count: all are copied.

    Args:
        devices: Buffers elsewhere, as on the host, would have something wait for the loss.
    """
    found: dict[int, Place] = {}
    modules: list[nn.Module | None] = list(roots)
    seen: set[int] = set()
    for m in modules:  # as nn.Module.modules() does, in half the time
        if m is not None and id(m) not in seen:
            seen.add(id(m))
            modules += m._modules.values()
            for name, t in m._buffers.items() if m._buffers and m.training else ():
                if t is not None and _can_keep(t, devices):
                    found[id(t)] = m._buffers, name, t
    places = list(found.values())
    if sum(t.nbytes for _, _, t in places) > MAX_BYTES:
        places = _smallest(places)
    groups = defaultdict(list)
    for place in places:
        groups[place[2].dtype, place[2].device].append(place)
    return [KeptBuffers(places, _join([t for _, _, t in places])) for places in groups.values()]


@torch.no_grad()
def put_back_unless_finite(kept: Iterable[KeptBuffers], loss: Tensor) -> None:
    """Put all back where a loss, of shape (), isn't finite; without waiting for it."""
    for places, before in kept:
        tensors = [t for _, _, t in places]
        is_finite = comm.copy(loss.detach(), before.device) * 0 == 0  # isfinite launches twice as many kernels
        # Through .data, as batch_norm itself does: the version stays, so backward accepts what forward saved.
        torch.where(is_finite, _join(tensors), before, out=before)
        foreach_copy_([t.data for t in tensors], _split(before, tensors))
        for i, (table, name, t) in enumerate(places):
            new = table.get(name)
            if new is not None and new is not t and _fits(new, t):  # not written: it may be the batch, or an output
                table[name] = torch.where(is_finite, new, _split(before, tensors)[i])


def _can_keep(t: Tensor, devices: Collection[torch.device]) -> bool:
    if not t.is_floating_point() or t.device not in devices or t.requires_grad or t.is_inference():
        return False
    return t.layout is torch.strided and t.is_contiguous()  # an expanded one is constant


def _fits(new: Tensor, old: Tensor) -> bool:
    return new.shape == old.shape and new.dtype == old.dtype and new.device == old.device and not new.requires_grad


def _smallest(places: list[Place]) -> list[Place]:
    places = sorted(places, key=lambda place: place[2].nbytes)
    ends = itertools.accumulate(t.nbytes for _, _, t in places)
    return [place for place, end in zip(places, ends) if end <= MAX_BYTES]


def _join(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t if t.dim() == 1 else t.view(-1) for t in tensors])


def _split(joined: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    parts = torch.split(joined, [t.numel() for t in tensors])
    return [part if t.dim() == 1 else part.view(t.shape) for part, t in zip(parts, tensors)]
