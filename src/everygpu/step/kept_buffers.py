"""Buffers that a forward may write, such as running statistics: put back where the batch's loss is not finite."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from everygpu import comm
from everygpu.torch_private.tensors import foreach_copy_

MAX_BYTES = 64 * 2**20
"""Of what is kept, the smallest buffers first."""


class KeptBuffers(NamedTuple):
    """Buffers of one dtype and device, as they were before a forward."""

    places: list[tuple[dict[str, Tensor | None], str, Tensor]]
    before: Tensor
    """Side by side."""


@torch.no_grad()
def keep_buffers(roots: Iterable[nn.Module], devices: Collection[torch.device]) -> list[KeptBuffers]:
    """Copy the floating-point buffers of modules in training mode, and of those below them.

    Torch's version counters don't tell which a forward writes, as writes through ``.data`` don't count: all are copied.

    Args:
        devices: Buffers elsewhere, as on the host, would have something wait for the loss.
    """
    found: dict[int, tuple[dict[str, Tensor | None], str, Tensor]] = {}
    left, seen = list(roots), set()
    while left:
        m = left.pop()
        if id(m) not in seen:
            seen.add(id(m))
            left += [child for child in m._modules.values() if child is not None]
            for name, t in m._buffers.items() if m.training else ():
                if t is not None and t.device in devices and _can_keep(t):
                    found.setdefault(id(t), (m._buffers, name, t))
    groups, room = defaultdict(list), MAX_BYTES
    for place in sorted(found.values(), key=lambda place: place[2].nbytes):
        room -= place[2].nbytes
        if room >= 0:
            groups[place[2].dtype, place[2].device].append(place)
    return [KeptBuffers(places, _join([t for _, _, t in places])) for places in groups.values()]


@torch.no_grad()
def put_back_unless_finite(kept: Iterable[KeptBuffers], loss: Tensor) -> None:
    """Put all back where a loss, of shape (), isn't finite; without waiting for it."""
    for places, before in kept:
        tensors = [t for _, _, t in places]
        is_finite = comm.copy(loss.detach(), before.device) * 0 == 0  # isfinite launches twice as many kernels
        # Through .data, as batch_norm itself does: the version stays, so backward accepts what forward saved.
        foreach_copy_([t.data for t in tensors], _split(torch.where(is_finite, _join(tensors), before), tensors))
        for i, (table, name, t) in enumerate(places):
            new = table.get(name)
            if new is not None and new is not t and _fits(new, t):  # not written: it may be the batch, or an output
                table[name] = torch.where(is_finite, new, _split(before, tensors)[i])


def _can_keep(t: Tensor) -> bool:
    is_plain = t.is_floating_point() and t.layout is torch.strided and t.is_contiguous()  # an expanded one is constant
    return is_plain and not t.is_inference() and not t.requires_grad


def _fits(new: Tensor, old: Tensor) -> bool:
    return new.shape == old.shape and new.dtype == old.dtype and new.device == old.device and not new.requires_grad


def _join(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.view(-1) for t in tensors])


def _split(joined: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return [part.view(t.shape) for part, t in zip(torch.split(joined, [t.numel() for t in tensors]), tensors)]
