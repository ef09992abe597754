"""Buffers that a forward writes, such as running statistics: put back where the batch's loss is not finite."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from everygpu import comm
from everygpu.parallel.buckets.memory import versions_of
from everygpu.parallel.cuda_graphs.multi_gpu_graph import is_capturing
from everygpu.torch_private.tensors import foreach_copy_

MAX_BYTES = 64 * 2**20
"""Of what is kept, the smallest buffers first."""
NUM_LOOKS = 3
"""Forwards after which a buffer that is as it was counts as one that none writes, until torch counts a write to it."""
_RUNNING_STATS = ("running_mean", "running_var")


class _Place(NamedTuple):
    """A buffer, and where it is."""

    table: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    key: tuple[int, str]


class _Group(NamedTuple):
    """Buffers of one dtype and device."""

    places: list[_Place]
    before: Tensor
    """As they were, side by side."""


class _Before(NamedTuple):
    """Buffers as they were before a forward."""

    groups: list[_Group]
    left: list[_Place]
    """Those that no forward has written so far."""
    versions: list[int]
    """Theirs."""


class KeptBuffers:
    """The floating-point buffers of modules in training mode that a forward writes.

    Torch's version counters don't tell which these are, as writes through ``.data`` don't count. So all are kept and
    compared in their first forwards, and from then on those that one of them has written.

    Args:
        devices: Of the replicas: buffers elsewhere, as on the host, would have something wait for the loss.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = set(devices)
        self._written: set[tuple[int, str]] = set()
        self._num_looks: dict[tuple[int, str], int] = defaultdict(int)

    @torch.no_grad()
    def take(self, roots: Iterable[nn.Module]) -> _Before:
        """Copy them before a forward.

        Args:
            roots: Modules; those below them count too.
        """
        found: dict[tuple[torch.dtype, torch.device], list[_Place]] = defaultdict(list)
        places, room = list(_places(roots, self._devices)), MAX_BYTES
        chosen = [p for p in places if p.key in self._written or self._num_looks[p.key] < NUM_LOOKS]
        for place in sorted(chosen, key=lambda place: place.tensor.nbytes):
            t = place.tensor
            if t.nbytes <= room:
                room -= t.nbytes
                found[t.dtype, t.device].append(place)
        left = [p for p in places if p.key not in self._written]
        groups = [_Group(together, _join([p.tensor for p in together])) for together in found.values()]
        return _Before(groups, left, versions_of([p.tensor for p in left]))

    @torch.no_grad()
    def put_back_unless_finite(self, before: _Before, loss: Tensor) -> None:
        """Put all back where a loss, of shape (), isn't finite; without waiting for it."""
        left = before.left
        for place, old_version, version in zip(left, before.versions, versions_of([p.tensor for p in left])):
            if version != old_version or place.table.get(place.name) is not place.tensor:
                self._written.add(place.key)
        for places, old in before.groups:
            tensors = [p.tensor for p in places]
            now = _join(tensors)
            self._look(places, old, now)
            is_finite = comm.copy(loss.detach(), old.device) * 0 == 0  # isfinite launches twice as many kernels
            # Through .data, as batch_norm itself does: the version stays, so backward accepts what forward saved.
            foreach_copy_([t.data for t in tensors], _split(torch.where(is_finite, now, old), tensors))
            if any(p.table.get(p.name) is not p.tensor for p in places):
                _replace(places, _split(old, tensors), is_finite)

    def _look(self, places: list[_Place], old: Tensor, now: Tensor) -> None:
        """Note which of a group's buffers a forward has written, where that isn't known and the host may wait."""
        if is_capturing() or all(p.key in self._written for p in places):
            return
        tensors = [p.tensor for p in places]
        same = torch.stack([(part == 0).all() for part in _split((now != old).to(torch.uint8), tensors)]).tolist()
        for place, is_same in zip(places, same):
            self._num_looks[place.key] += 1
            if not is_same or place.name in _RUNNING_STATS:
                self._written.add(place.key)


def _replace(places: list[_Place], old: list[Tensor], is_finite: Tensor) -> None:
    """Replace other tensors that a forward has put there: they may be the batch, or an output, and aren't written."""
    for (table, name, t, _), before in zip(places, old):
        new = table.get(name)
        if new is not t and new is not None and _fits(new, t):
            table[name] = torch.where(is_finite, new, before)


def _places(roots: Iterable[nn.Module], devices: set[torch.device]) -> Iterator[_Place]:
    seen: set[int] = set()
    for m in (m for root in roots for m in root.modules() if m.training):
        for name, t in m._buffers.items():
            if t is not None and id(t) not in seen and t.device in devices and _can_keep(t):
                seen.add(id(t))
                yield _Place(m._buffers, name, t, (id(m._buffers), name))


def _can_keep(t: Tensor) -> bool:
    return (
        t.is_floating_point()
        and t.layout is torch.strided
        and t.is_contiguous()  # an expanded one can't be written
        and not t.is_inference()
        and not t.requires_grad
    )


def _fits(new: Tensor, old: Tensor) -> bool:
    return new.shape == old.shape and new.dtype == old.dtype and new.device == old.device and not new.requires_grad


def _join(tensors: list[Tensor]) -> Tensor:
    joined = torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    foreach_copy_(_split(joined, tensors), tensors)
    return joined


def _split(joined: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return [part.view(t.shape) for part, t in zip(torch.split(joined, [t.numel() for t in tensors]), tensors)]
