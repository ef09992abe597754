"""The memory of a training step: every trainable parameter and its gradient, side by side on every device."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from everygpu import comm, tree
from everygpu.errors import OptimizerError, PlacementError
from everygpu.parallel.buckets import (
    UPDATE_BYTES,
    BucketPlan,
    fill_views,
    make_twins,
    new_leaves,
    plan_buckets,
    put_back,
    versions_of,
)
from everygpu.parallel.replicas.module_tree import has_hooks
from everygpu.parallel.replicas.optimizer_steps import OptimizerSteps
from everygpu.torch_private.core import num_storage_uses

PerDevice = list[Tensor]

_getters = [operator.attrgetter(name) for name in ("shape", "dtype", "device", "requires_grad", "grad_dtype")]


class FlatParameters:
    """Parameters and gradients in flat buckets that stay where they are from step to step.

    The primary's parameters move in, keeping their identity; each other device has leaf twins of them, so that
    backward leaves every replica's gradients in that replica's buckets.

    With ``num_chunks``, more than devices, or as many, sums are the same on any number of devices: gradients are added
    up by a tree, after each batch. So the primary has twins, too: what a loss computes from a parameter itself is no
    replica's gradient, and comes to the sum at last.

    Raises:
        PlacementError: a parameter is elsewhere.
        OptimizerError: two elements of parameters share memory, or gradients are to have another dtype.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        devices: Sequence[torch.device],
        bucket_bytes: int = UPDATE_BYTES,
        *,
        whole: bool = False,
        num_chunks: int = 0,
    ) -> None:
        _check_places(params, devices[0])
        check_memory(params)
        self.params = list(params)
        self.devices = list(devices)
        self.by_tree = num_chunks > 0
        self.plans = plan_buckets(params, num_chunks or len(devices), bucket_bytes, whole=whole)
        self.values = [[plan.make_flat(d) for d in devices] for plan in self.plans]
        self.grads = [[plan.make_flat(d) for d in devices] for plan in self.plans]
        # Views of their own version counters: of the values, to notice writes; of the gradients, which are new.
        self._slots = [_slots(self.plans, self.values, j) for j in range(len(devices))]
        self._grad_slots = [_slots(self.plans, self.grads, j) for j in range(len(devices))]
        self.twins: list[list[Tensor]] = []
        self._direct: dict[int, Tensor] = {}
        """Gradients of parameters themselves, of this batch."""
        self._totals: list[PerDevice] = []
        """Of the batches of this update so far, where these are added up one by one, each device's chunks."""
        self._are_equal = False
        """Whether all devices had the same values when this was set: before they are written it is unset, so that an
        interruption leaves it so."""
        self._steps = OptimizerSteps(params if len(devices) > 1 else ())
        self._versions: list[int] = []
        self._grad_versions: list[list[int]] = []
        self.adopt()
        self.twins = [make_twins(params, slots) for slots in self._slots[not self.by_tree :]]
        self._own_uses: list[int] = []
        self._layouts = _layouts(params)
        self.begin()

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Whether these are the parameters it was made for, as they were."""
        return tree.are_same(params, self.params) and _layouts(params) == self._layouts

    def adopt(self) -> None:
        """Take in the parameters' values from wherever they are now, and send them to every device."""
        self._are_equal = False
        with torch.no_grad():
            for p, slot in zip(self.params, self._slots[0]):
                if p.data_ptr() != slot.data_ptr():
                    slot.copy_(p)
                    p.data = slot
        self.put_back()  # what moves a parameter in forward also moves its twins
        self._send(range(len(self.plans)))

    def put_back(self) -> None:
        """Move parameters and twins back to their slots, after a captured forward may have moved them."""
        for tensors, slots in [(self.params, self._slots[0]), *zip(self.twins[::-1], self._slots[::-1])]:
            put_back(tensors, slots)

    def count_own_uses(self) -> None:
        """Count the present uses of the parameters' memory as the step's own."""
        self._own_uses = self._num_uses()

    def is_held(self) -> bool:
        """Whether parameters were moved away while something else refers to where they were.

        As in ``backup = p.data; p.data = average``: taking the average in would overwrite the backup.
        """
        return self._is_moved() and any(now > own for now, own in zip(self._num_uses(), self._own_uses))

    def _is_moved(self) -> bool:
        return list(map(Tensor.data_ptr, self.params)) != list(map(Tensor.data_ptr, self._slots[0]))

    def _num_uses(self) -> list[int]:
        """Count the uses of each bucket's memory, the parameters themselves left out."""
        pairs = enumerate(zip(self.params, self._slots[0]))
        at_home = {i for i, (p, s) in pairs if p.untyped_storage().data_ptr() == s.untyped_storage().data_ptr()}
        return [
            num_storage_uses(first) - sum(s.index in at_home for s in plan.slots)
            for plan, (first, *_) in zip(self.plans, self.values)
        ]

    def follow_edits(self) -> None:
        """Send what was written to the parameters since the last step: loaded, clamped, swapped for averages."""
        self.follow_counted_edits()
        self._send([b for b in range(len(self.plans)) if self._differs(b)])

    def follow_counted_edits(self) -> None:
        """Broadcast parameters that were moved, or written by an optimizer or in a way that torch counts."""
        if self._is_moved():
            self.adopt()
        self.send_written()

    def send_written(self) -> None:
        """Send what was written since the last step by an optimizer, or as far as torch counts it, where parameters
        are in their places; all of it after an interruption.
        """
        if self._steps.have_come:
            self._are_equal = self._steps.have_come = False
        versions = versions_of(self.params)
        if not self._are_equal:
            self._send(range(len(self.plans)))
        elif versions != self._versions:
            written = {i for i, (now, then) in enumerate(zip(versions, self._versions)) if now != then}
            self._send([b for b, plan in enumerate(self.plans) if any(s.index in written for s in plan.slots)])

    def copies(self) -> dict[int, list[Tensor]]:
        """Return each parameter and its copies, by its ``id``, after edits that torch counts were sent; others would be
        lost by sending.
        """
        self.follow_counted_edits()
        return {id(p): [p, *others] for p, *others in zip(self.params, *self._slots[1:])}

    def begin(self) -> None:
        """Start with gradients of zero."""
        self._totals, self._direct = [], {}
        self._clear_grads()
        self._grad_versions = self.grad_versions()

    def _clear_grads(self) -> None:
        for bucket in self.grads:
            for flat in bucket:
                flat.fill_(-0.0 if self.by_tree else 0.0)  # what is added to -0.0 stays what it is, also if it is -0.0

    def attach_grads(self) -> None:
        """Attach gradients, so that backward accumulates in the buckets."""
        for tensors, slots in zip(self.twins if self.by_tree else [self.params, *self.twins], self._grad_slots):
            for t, grad in zip(tensors, slots):
                t.grad = grad

    def detach_grads(self) -> None:
        """Detach gradients, as the buckets hold no complete gradient of the parameters."""
        for i, (p, slot) in enumerate(zip(self.params, self._grad_slots[0])):
            if self.by_tree and p.grad is not None:
                self._direct[i] = p.grad.to_dense()
                self.note_grads({i})
            elif not self.by_tree and p.grad is not slot:  # a hook or the loss has set another
                self._replace_grad(i, p.grad)
        self._forget_grads()

    @contextmanager
    def whole_grads(self, touched: set[int]) -> Iterator[None]:
        """Between ``reduce`` and the update, let parameters have their gradients, to be looked at and written."""
        for bucket in self.grads:
            comm.all_gather(bucket)
        for i, (p, slot) in enumerate(zip(self.params, self._grad_slots[0])):
            p.grad = slot if i in touched else None
        try:
            yield
            for i, (p, slot) in enumerate(zip(self.params, self._grad_slots[0])):
                if p.grad is None:
                    touched.discard(i)
                elif p.grad is not slot:
                    slot.copy_(p.grad)
                    touched.add(i)
        finally:
            self._forget_grads()
        for first, *others in self.grads:
            comm.broadcast(first, others)

    def slots(self, replica: int) -> dict[int, Tensor]:
        """Return each parameter's place in a replica's memory."""
        return dict(enumerate(self._slots[replica]))

    @property
    def has_direct_grads(self) -> bool:
        """Whether parameters themselves got gradients from the last batch, as of a loss."""
        return bool(self._direct)

    def grad_slots(self, replica: int) -> list[Tensor]:
        """Return each parameter's place in the memory of a replica's gradients."""
        return self._grad_slots[replica]

    @contextmanager
    def in_new_leaves(self) -> Iterator[list[dict[int, Tensor]]]:
        """Replace parameters and twins by new leaves of the same memory, which share version counters.

        A tensor's accumulator of gradients, and its stream, last as long as any graph that leads there, such as that of
        a loss that somebody keeps: a capture needs new ones. Yields each device's new leaves, by the ``id`` of the
        tensor in whose place each is.
        """
        before = [self.params, *self.twins]
        self.params, *self.twins = map(new_leaves, before)
        try:
            yield [dict(zip(map(id, row), now)) for row, now in zip(before, [self.params, *self.twins])]
        finally:
            self.params, *self.twins = before

    def touched(self, since: list[list[int]] | None = None) -> set[int]:
        """Return the parameters that have got a gradient, on any device."""
        pairs = zip(self.grad_versions(), since or self._grad_versions)
        return {i for row, then in pairs for i, is_other in enumerate(map(operator.ne, row, then)) if is_other}

    def grad_versions(self) -> list[list[int]]:
        """Return how often torch has counted a write to each device's gradients."""
        return [versions_of(slots) for slots in self._grad_slots]

    def disregard(self, since: list[list[int]]) -> None:
        """Have ``touched`` not return what was written since: by a capture, which only replays do."""
        rows = zip(self._grad_versions, since, self.grad_versions())
        self._grad_versions = [[v + now - then for v, then, now in zip(*row)] for row in rows]

    def note_grads(self, touched: set[int]) -> None:
        """Make ``touched`` include these, whose gradients were written without a count by torch."""
        increment_version([self._grad_slots[0][i] for i in sorted(touched)])

    def reduce(self) -> None:
        """Add the gradients up: each device gets the sum of its own chunk."""
        if not self.by_tree:
            for bucket in self.grads:
                comm.reduce_scatter(bucket)
        elif not self._totals:
            self._sum_by_tree()
        for chunks, totals in zip(self._own_chunks(), self._totals):
            for chunk, total in zip(chunks, totals):
                chunk.copy_(total)
        self._totals = []

    def fold(self) -> None:
        """Add the gradients of one of several batches up, and then to those of the batches before."""
        if not self.by_tree:
            return
        self._sum_by_tree()
        self._totals = self._totals or [[torch.full_like(c, -0.0) for c in chunks] for chunks in self._own_chunks()]
        for chunks, totals in zip(self._own_chunks(), self._totals):
            for chunk, total in zip(chunks, totals):
                total.add_(chunk)
        self._clear_grads()

    def _sum_by_tree(self) -> None:
        for plan, bucket, chunks in zip(self.plans, self.grads, self._own_chunks()):
            comm.tree_reduce_scatter(bucket)
            direct = [self._direct.get(slot.index) for slot in plan.slots]
            if any(g is not None for g in direct):
                flat = torch.full_like(bucket[0], -0.0)
                fill_views(plan.views(flat), direct)
                for chunk, part in zip(chunks, flat.chunk(len(chunks))):
                    chunk.add_(comm.copy(part, chunk.device))
        self._direct = {}

    def _own_chunks(self) -> list[PerDevice]:
        """Return what each device adds up of each bucket."""
        return _cut(self.grads, len(self.devices))

    def all_gather_params(self) -> None:
        """Copy each device's own chunk of the values to the others."""
        for bucket in self.values:
            comm.all_gather(bucket)
        self.note_update()

    def begin_update(self) -> None:
        """Note that devices are about to write values of their own, until ``note_update``."""
        self._are_equal = False

    def note_update(self) -> None:
        """Make graphs that still refer to the old values notice that there are new ones, the same on all devices."""
        for tensors in (self.params, *self.twins):
            increment_version(tensors)
        self._versions = versions_of(self.params)
        self._are_equal = True

    def chunks(self, buckets: Sequence[PerDevice]) -> list[PerDevice]:
        """Cut each device's own chunks out of its buckets."""
        return _cut(buckets, self.plans[0].num_chunks if self.plans else 0)

    def take_grads(self, other: "FlatParameters") -> None:
        """Go on from what has accumulated elsewhere; a parameter that was not there brings its own gradient."""
        if other._totals:  # what isn't a device's own chunk is zero
            other.reduce()
        theirs = {id(p) for p in other.params}
        for p, slot in zip(self.params, self._grad_slots[0]):
            if p.grad is not None and id(p) not in theirs:
                slot.add_(p.grad)
        mine = {id(p): i for i, p in enumerate(self.params)}
        for k in other.touched():
            i = mine.get(id(other.params[k]))
            if i is not None and self.params[i].shape == other._grad_slots[0][k].shape:
                for slots in other._grad_slots:
                    self._grad_slots[0][i].add_(comm.copy(slots[k], self.devices[0]))

    def _replace_grad(self, index: int, grad: Tensor | None) -> None:
        for slots, versions in zip(self._grad_slots, self._grad_versions):
            slots[index].zero_()
            versions[index] = slots[index]._version
        if grad is not None:
            self._grad_slots[0][index].copy_(grad.detach())

    def _forget_grads(self) -> None:
        for p in self.params:
            p.grad = None

    def _send(self, which: Sequence[int]) -> None:
        """Send some buckets, where the others are equal."""
        self._are_equal = False
        for b in which:
            first, *others = self.values[b]
            comm.broadcast(first, others)
        self._versions = versions_of(self.params)
        self._are_equal = True

    def _differs(self, b: int) -> bool:
        """Look for writes that torch doesn't count, such as ``p.data.clamp_()``; on the CPU, where looking is free."""
        if self.devices[0].type != "cpu":
            return False
        first, *others = (flat.view(torch.uint8) for flat in self.values[b])  # nan and the sign of zero included
        return not all(torch.equal(first, other) for other in others)


def _slots(plans: Sequence[BucketPlan], buckets: Sequence[PerDevice], replica: int) -> list[Tensor]:
    pairs = [(slot.index, slot.view(flats[replica]).data) for plan, flats in zip(plans, buckets) for slot in plan.slots]
    return [view for _, view in sorted(pairs, key=lambda pair: pair[0])]


def _cut(buckets: Sequence[PerDevice], num: int) -> list[PerDevice]:
    """Return so many chunks of each bucket, neighbours of one device, each from the device whose it is."""
    return [[flats[j * len(flats) // num].chunk(num)[j] for j in range(num)] for flats in buckets]


def _layouts(params: Sequence[Tensor]) -> list[list[Any]]:
    """Return what memory is laid out by, one list for each property: it runs in every step."""
    plain = (list(map(get, params)) for get in _getters)
    return [list(map(has_hooks, params)), list(map(Tensor.stride, params)), *plain]


def _check_places(params: Sequence[Tensor], device: torch.device) -> None:
    """Refuse parameters on other devices, or whose gradients are to have another dtype."""
    for i, p in enumerate(params):
        if p.device != device:
            raise PlacementError(
                f"TrainStep: every parameter of the optimizer must be on {device}, got parameter {i} of shape "
                f"{tuple(p.shape)} on {p.device}. Move its module there before making the optimizer."
            )
        if p.grad_dtype not in (None, p.dtype):  # None for any
            raise OptimizerError(
                f"TrainStep: gradients must have their parameters' dtypes, got parameter {i} of {p.dtype} with "
                f"grad_dtype={p.grad_dtype}. Set its grad_dtype to {p.dtype}, or train with DataParallel in an "
                f"ordinary loop."
            )


def check_memory(params: Sequence[Tensor]) -> None:
    """Refuse parameters that lie within each other's memory, or have two elements at one place."""
    spans = sorted((p.data_ptr(), p.data_ptr() + _extent_bytes(p), i) for i, p in enumerate(params) if p.data_ptr())
    end = 0
    for begin, until, i in spans:
        is_spread = any(size > 1 and step == 0 for size, step in zip(params[i].shape, params[i].stride()))
        if begin < end or is_spread:
            raise OptimizerError(
                f"TrainStep, ShardedOptimizer: parameters must have memory of their own, got parameter {i} of shape "
                f"{tuple(params[i].shape)}, which shares some. To tie weights, use one Parameter in both places."
            )
        end = max(end, until)


def _extent_bytes(p: Tensor) -> int:
    return (sum((size - 1) * step for size, step in zip(p.shape, p.stride())) + 1) * p.element_size()
