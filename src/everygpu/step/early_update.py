"""Updates that are captured with a backward, from gradients where that leaves them."""

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from everygpu import comm
from everygpu.comm.streams import synchronize_streams
from everygpu.devices.p2p import reach_each_other
from everygpu.errors import CaptureError
from everygpu.parallel.buckets import BLOCK_NUMEL
from everygpu.parallel.cuda_graphs.multi_gpu_graph import ReadyEvents
from everygpu.parallel.cuda_graphs.transfer import (
    GradTables,
    add_blocks,
    addresses,
    block_addresses,
    block_lengths,
    lay_out,
    send_blocks,
)
from everygpu.step.finite_check import UpdateStatus
from everygpu.step.flat_parameters import FlatParameters
from everygpu.step.shards import Shards
from everygpu.step.update import clip_factor, find_inf, multiply, norm_of, norms_of, total_norm
from everygpu.torch_private.core import unscale_

_LOSS = -1
"""Stands among the buckets for what is done when the loss is there."""


def can_update_early(flat_params: FlatParameters, shards: Shards) -> bool:
    """Whether an update can be captured: several devices must read and write each other's memory in kernels."""
    devices = flat_params.devices
    is_alone = len(shards.devices) == 1
    reach = is_alone or (len(set(devices)) == len(devices) and reach_each_other(devices) and comm.has_triton())
    return supports_captured_update(flat_params, shards) and reach


def supports_captured_update(flat_params: FlatParameters, shards: Shards) -> bool:
    """Whether parameters and optimizers are such as captured updates serve."""
    slots = [slot for plan in flat_params.plans for slot in plan.slots]
    whole_blocks = len(shards.devices) == 1 or all(slot.start % BLOCK_NUMEL == 0 for slot in slots)
    return shards.fuses and bool(slots) and whole_blocks


class EarlyUpdate(ABC):
    """An update that is captured with the backward. A capture's memory stays where it is: so do gradients.

    The optimizers are prepared for parameters that are ``expected`` to get one; a bucket waits for those of its own.
    ``overlap_backward`` updates each bucket while the rest of backward runs; ``checks`` leaves out what isn't finite.
    """

    def __init__(
        self, flat_params: FlatParameters, shards: Shards, expected: set[int], *, overlap_backward: bool, checks: bool
    ) -> None:
        self._flat_params = flat_params
        self._shards = shards
        self._expected = expected
        self._overlaps_backward = overlap_backward
        self._checks = checks
        self._devices = flat_params.devices
        self._plans = flat_params.plans
        self.touched: set[int] = set()
        """The parameters that got a gradient, on any device."""
        self._marks = ReadyEvents(self._devices)
        self._made = torch.full((), UpdateStatus.APPLIED, dtype=torch.float32, device=self._devices[0])
        self._found_inf = [torch.zeros(len(self._plans), dtype=torch.float32, device=d) for d in self._devices]
        """For each device and bucket, 1 where it is not updated."""
        self.status = torch.zeros((), dtype=torch.float32, device=self._devices[0])
        """Of the last update; see ``FiniteCheck``."""

    def check(self, loss: Tensor) -> None:
        """Skip the update if the loss, of shape (), isn't finite; called before the backward."""
        torch.add(self._made, comm.copy(loss, self.status.device), alpha=0, out=self.status)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take the gradients of a backward within."""
        self._clear()
        replicas = self._replicas()
        awaited = [[slot.index for slot in plan.slots if slot.index in self._expected] for plan in self._plans]
        try:
            with self._marks.watching([[[t[i] for i in row] for t in replicas] for row in awaited], self._watch):
                yield
            found = [self._grads_of(replica) for replica in range(len(replicas))]
            self.touched = {i for grads in found for i, g in enumerate(grads) if g is not None}
            for b, replica in itertools.product(self._used(self.touched - self._expected), range(len(replicas))):
                self._marks.forget(b, replica)  # a gradient that wasn't expected may have come after the moment
            self._take_grads()
        finally:
            self._clear()
        if not self._shards.may_capture(self.touched):
            raise CaptureError("other parameters take part than in the steps before")

    @abstractmethod
    def queue(self, clip_norm: float | None = None) -> Tensor | None:
        """Queue the update, and have the devices' current streams wait for it; return the gradient's norm before it was
        clipped, if it had to be known.
        """

    @abstractmethod
    def finish_capture(self) -> None:
        """After the capture: do what was no part of it, and let go of gradients."""

    def _watch(self, t: Tensor, note: Callable[[Tensor], None]) -> RemovableHandle:
        def complete(t: Tensor) -> None:
            if self._overlaps_backward:  # its value is no longer the one that forward saw: backward refuses to use it
                increment_version(t)
            note(t)

        return t.register_post_accumulate_grad_hook(complete)  # type: ignore[no-any-return, no-untyped-call]

    @abstractmethod
    def _take_grads(self) -> None:
        """Keep all gradients."""

    def _used(self, params: set[int]) -> list[int]:
        """List the buckets of some parameters."""
        return [b for b, plan in enumerate(self._plans) if any(slot.index in params for slot in plan.slots)]

    def _step(self, norm: Tensor | None, clip_norm: float | None, grads: dict[int, Tensor] | None = None) -> None:
        """Update from all gradients, if the status allows it; their norm is on the first device.

        They are in flat memory, or where ``grads`` says.
        """
        found_inf, scales = None, None
        if self._checks:
            if norm is not None:
                self.status.add_(norm, alpha=0)
            is_left_out = torch.ne(self.status, UpdateStatus.APPLIED).float()
            found_inf = comm.copy_to_each(is_left_out, self._shards.devices)
        if clip_norm is not None and norm is not None:
            scales = comm.copy_to_each(clip_factor(norm, clip_norm).reciprocal(), self._shards.devices)
        self._shards.step(self.touched, found_inf, grads=grads, grad_scales=scales)

    def _replicas(self) -> list[list[Tensor]]:
        """List what replicas' gradients are of, for each device."""
        flat_params = self._flat_params
        return flat_params.twins if flat_params.by_tree else [flat_params.params, *flat_params.twins]

    def _grads_of(self, replica: int) -> list[Tensor | None]:
        """Return a device's gradients, the first one's with those of parameters themselves, as of a loss."""
        grads = [t.grad for t in self._replicas()[replica]]
        if not self._flat_params.by_tree or replica:
            return grads
        direct = [p.grad for p in self._flat_params.params]
        if any(d is not None and self._is_replicas(i) for i, d in enumerate(direct)):
            raise CaptureError("the loss computes with parameters that replicas have, too")
        return [g if d is None else d for g, d in zip(grads, direct)]

    def _is_replicas(self, i: int) -> bool:
        return any(tensors[i].grad is not None for tensors in self._replicas())

    def _clear(self) -> None:
        for tensors in (self._flat_params.params, *self._flat_params.twins):
            for t in tensors:
                t.grad = None


class UpdateInPlace(EarlyUpdate):
    """Steps on one device as a plain loop does: on the parameters and their own gradients."""

    _grads: dict[int, Tensor]

    def check(self, loss: Tensor) -> None:
        super().check(loss)
        if self._overlaps_backward:
            (found_inf,) = self._found_inf
            torch.ne(self.status.expand_as(found_inf), UpdateStatus.APPLIED, out=found_inf)

    def queue(self, clip_norm: float | None = None) -> Tensor | None:
        if self._overlaps_backward:
            self._marks.run_overlapped({b: functools.partial(self._update, b) for b in self._used(self.touched)})
            if self._checks:
                self.status.add_(self._found_inf[0].amax(), alpha=UpdateStatus.PARTLY_APPLIED - UpdateStatus.APPLIED)
            return None
        needs_norm = self._checks or clip_norm is not None
        norm = norm_of(list(self._grads.values())).float() if needs_norm and self._grads else None
        self._step(norm, clip_norm, self._grads)
        return norm

    def finish_capture(self) -> None:
        self._grads = {}

    def _take_grads(self) -> None:
        self._grads = {}
        for b, plan in enumerate(self._plans):
            for slot in plan.slots:
                if slot.index in self.touched:
                    grad = self._flat_params.params[slot.index].grad
                    laid = lay_out(grad, slot, plan.dtype, self._devices[0])
                    self._grads[slot.index] = laid.as_strided((slot.numel,), (1,))
                    if laid is not grad:
                        self._marks.forget(b, 0)

    def _update(self, b: int) -> None:
        grads = [self._grads[slot.index] for slot in self._plans[b].slots if slot.index in self.touched]
        found = self._found_inf[0][b]
        if self._checks:
            unscale_(norms_of(grads), found, self._made)  # which is 1
        self._shards.step(self.touched, [found] if self._checks else None, bucket=b, grads=self._grads)


class UpdateByChunks(EarlyUpdate):
    """Updates each bucket when all devices have its gradients, while the rest of backward runs.

    One kernel adds each device's part of the gradients up, torch's fused kernels update it, and another kernel sends it
    to the other devices. During backward that is done with each bucket, or it is only summed, where the update has to
    know all gradients.
    """

    def __init__(
        self, flat_params: FlatParameters, shards: Shards, expected: set[int], *, overlap_backward: bool, checks: bool
    ) -> None:
        super().__init__(flat_params, shards, expected, overlap_backward=overlap_backward, checks=checks)
        devices = self._devices
        # Where replicas share a device, that has several neighbouring chunks.
        self._plans = plans = [plan.in_chunks(len(devices)) for plan in self._plans]
        comm.connect(devices)
        # What the kernels read: tables that are filled once the capture is made.
        self._sources = [GradTables(plan, devices, devices) for plan in plans]
        self._lengths = [[torch.zeros(plan.num_blocks, dtype=torch.int32, device=d) for d in devices] for plan in plans]
        self._squares = [[torch.zeros_like(row, dtype=torch.float32) for row in bucket] for bucket in self._lengths]
        self._targets = [addresses(flats, d) for d, *flats in zip(devices, *flat_params.grads)]
        self._status_at = [addresses([self.status], d) for d in devices]
        self._values = [
            [block_addresses(plan, rank, flat_params.slots(rank)).to(d) for rank, d in enumerate(devices)]
            for plan in plans
        ]
        self._others = [
            [addresses([*flats[:rank], *flats[rank + 1 :]], d) for rank, d in enumerate(devices)]
            for flats in flat_params.values
        ]
        for b in range(len(plans)):  # nothing is moved yet, but kernels are loaded, as while capturing is forbidden
            self._reduce(b)
            self._send(b)

    def check(self, loss: Tensor) -> None:
        super().check(loss)
        self._marks.mark(_LOSS)

    def queue(self, clip_norm: float | None = None) -> Tensor | None:
        used = self._used(self.touched)
        work = self._update if self._overlaps_backward else self._reduce
        works: dict[int, Callable[[], None]] = {b: functools.partial(work, b) for b in used}
        if self._checks and self._overlaps_backward:
            works[_LOSS] = self._send_gate
        self._marks.run_overlapped(works)
        if self._overlaps_backward:
            return None
        synchronize_streams(self._devices)
        squares = [torch.cat(rows).sum() for rows in zip(*self._squares)]
        norm: Tensor | None = torch.stack([comm.copy(s, self.status.device) for s in squares]).sum().sqrt()
        if self._flat_params.by_tree:
            norm = self._look_by_tree(clip_norm)
        self._step(norm, None if self._flat_params.by_tree else clip_norm)
        for b in used:
            self._send(b)
        synchronize_streams(self._devices)
        return norm

    def _look_by_tree(self, clip_norm: float | None) -> Tensor | None:
        """Look at the sums, and clip them, as an update that isn't captured does, to the bit."""
        flat_params = self._flat_params
        others = set(range(len(flat_params.params))) - self.touched
        for i, device in itertools.product(others, range(len(self._devices))):
            flat_params.grad_slots(device)[i].fill_(-0.0)
        shares = [list(column) for column in zip(*flat_params.chunks(flat_params.grads))]
        if clip_norm is not None:
            norm = total_norm(shares, self.status.device)
            multiply(shares, clip_factor(norm, clip_norm))
            return norm
        if self._checks:
            found = find_inf(shares, self._made)
            self.status.copy_(torch.where(found != 0, float("nan"), self.status))
        return None

    def finish_capture(self) -> None:
        for plan, sources, lengths in zip(self._plans, self._sources, self._lengths):
            sources.write()
            for rank, row in enumerate(lengths):
                row.copy_(block_lengths(plan, rank, self.touched))

    def _take_grads(self) -> None:
        """Keep all gradients; zeros for those of parameters that only other replicas have one of."""
        for replica in range(len(self._devices)):
            grads = self._grads_of(replica)
            for b, plan in enumerate(self._plans):
                touched = [slot.index for slot in plan.slots if slot.index in self.touched]
                if self._sources[b].take(replica, {i: grads[i] for i in touched}):
                    self._marks.forget(b, replica)

    def _send_gate(self) -> None:
        first = self._found_inf[0]
        torch.ne(self.status.expand_as(first), UpdateStatus.APPLIED, out=first)
        self._found_inf = list(comm.copy_to_each(first, self._devices))

    def _reduce(self, b: int) -> None:
        notes: dict[str, Sequence[Any]] = {} if self._overlaps_backward else {"squares": self._squares[b]}
        if self._checks and self._overlaps_backward:  # else the norm shows it
            notes = {
                "status": self._status_at,
                "found": self._found_inf,
                "mark": [UpdateStatus.PARTLY_APPLIED.value] * len(self._devices),
            }
        tables = self._sources[b].tables, self._lengths[b], self._targets
        add_blocks(self._plans[b], self._devices, *tables, index=b, by_tree=self._flat_params.by_tree, notes=notes)

    def _update(self, b: int) -> None:
        self._reduce(b)
        num = len(self._shards.devices)
        found_inf = [self._found_inf[j * len(self._devices) // num][b] for j in range(num)]
        self._shards.step(self.touched, found_inf if self._checks else None, bucket=b)
        self._send(b)

    def _send(self, b: int) -> None:
        if len(self._devices) > 1:
            send_blocks(self._plans[b], self._devices, self._values[b], self._lengths[b], self._others[b])
