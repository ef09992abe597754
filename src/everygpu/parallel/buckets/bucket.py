"""Tensors handed from the primary device to the others, and their gradients added up on the way back."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from everygpu import comm
from everygpu.parallel.buckets.copies import Streams, sum_on
from everygpu.parallel.buckets.memory import Grads, Use, same_bytes, versions_of
from everygpu.parallel.buckets.plan import BucketPlan, plan_bucket
from everygpu.parallel.buckets.slot_alias import SlotAlias
from everygpu.torch_private.autograd import are_batched
from everygpu.torch_private.tensors import num_storage_uses

ALIGNMENT_BYTES = 256
"""Slots begin at multiples of this, as cuBLAS and vectorized kernels like it and torch's allocator does."""

_Version = tuple["weakref.ref[Tensor]", int]
"""Which tensor, and how often it had been written."""


class Bucket:
    """Tensors of one dtype that travel together, with a persistent copy on every other device.

    A copy is one flat buffer per device; its slots have the shapes and strides of the originals. Refreshing
    writes the buffers in place, so memory and addresses stay the same from step to step. Memory that a graph
    or a user still holds is not overwritten: the copy then moves to new memory, unless the values are the same.
    So two forwards before one backward work, and so do weights swapped for an evaluation in between.

    Args:
        originals: At least one tensor, all of one dtype and alike in ``requires_grad``.
        device: Where they are.
        devices: Where the copies go.
        keep_storage: Lay the copies out as the originals are in the one storage they share, not side by side.
        fixed: Keep addresses also where others refer to the memory, as CUDA graphs do for good; only a graph
            before its backward still counts.
        trust_versions: Send only when an original or its ``.data`` was replaced, or written as far as torch counts
            it: not in place through ``.data``; after that call ``forget``.
        kept: Take note of where the originals are, so that ``current_copies`` knows whether copies are theirs.
    """

    def __init__(
        self,
        originals: Sequence[Tensor],
        device: torch.device,
        devices: Sequence[torch.device],
        *,
        keep_storage: bool = False,
        fixed: bool = False,
        trust_versions: bool = False,
        kept: bool = False,
    ) -> None:
        self.device = device
        self.devices = list(devices)
        self._requires_grad = originals[0].requires_grad
        unit = 1 if keep_storage else max(1, ALIGNMENT_BYTES // originals[0].element_size())
        self._plan = plan_bucket(originals, range(len(originals)), 1, together=keep_storage, unit=unit)
        self._fixed = fixed
        self._trust_versions = trust_versions
        self._kept = kept or trust_versions
        self._uses: list[weakref.ref[Use]] = []
        self._copies: list[_Copy | None] = [None] * len(self.devices)

    @property
    def plan(self) -> BucketPlan:
        """How the tensors lie in a copy."""
        return self._plan

    def refresh(self, originals: Sequence[Tensor], replicas: Sequence[int]) -> list[list[Tensor]]:
        """Bring copies up to date.

        Args:
            originals: The tensors now, shaped as at construction.
            replicas: Which of ``devices`` to serve; only graphs that have yet to run backward may hold on to
                what these were given last.
        Returns:
            For each of ``replicas``, its tensors; connected to ``originals``, also while autograd is off:
            activation checkpointing runs a replica again later, when it is on.
        """
        slots = self.send(originals, replicas)
        with torch.inference_mode(False), torch.set_grad_enabled(self._requires_grad):
            _, *outputs = _Broadcast.apply(self, replicas, slots, *originals)  # type: ignore[no-untyped-call]
        width = len(originals)
        return [outputs[i * width : (i + 1) * width] for i in range(len(slots))]

    def send(self, originals: Sequence[Tensor], replicas: Sequence[int]) -> list[list[Tensor]]:
        """Bring copies up to date without connecting them to the originals; arguments and result as for ``refresh``."""
        # Outside inference mode, or buffers made in it could never be written by a training step.
        with torch.inference_mode(False), torch.no_grad():
            self._transfer(originals, replicas)
        return [copy.slots for i in replicas if (copy := self._copies[i]) is not None]

    def sum_grads(self, grads: Sequence[Grads]) -> list[Tensor | None]:
        """Add the replicas' gradients, through one flat buffer each.

        Args:
            grads: One list per replica, None where a tensor took no part.
        Returns:
            One gradient per tensor on the primary device; None where no replica has one.
        """
        columns = [[g for g in column if g is not None] for column in zip(*grads)]
        dense = [k for k, column in enumerate(columns) if column and all(g.layout == torch.strided for g in column)]
        totals: list[Tensor | None] = [None] * len(columns)
        for k, total in zip(dense, self._sum_flat([[row[k] for k in dense] for row in grads], dense)):
            totals[k] = total
        for k, column in enumerate(columns):
            if column and totals[k] is None:
                totals[k] = sum_on(column, self.device)
        return totals

    def _transfer(self, originals: Sequence[Tensor], replicas: Sequence[int]) -> None:
        versions = list(zip(map(weakref.ref, originals), versions_of(originals)))
        if self._trust_versions:
            replicas = [i for i in replicas if (copy := self._copies[i]) is None or not copy.is_of(versions, originals)]
            if not replicas:
                return
        targets = [self._writable(i, versions) for i in replicas]
        source = self._plan.flatten(dict(enumerate(originals)), self.device)
        comm.broadcast(source, [target.flat for target in targets])
        for i, target in zip(replicas, targets):
            current = self._copies[i]
            if current is None or (current is not target and not same_bytes(current.flat, target.flat)):
                self._copies[i] = target
            if self._kept and (copy := self._copies[i]) is not None:
                copy.hold_memory(originals)

    def forget(self) -> None:
        """Send at the next refresh, whatever torch has counted."""
        for copy in self._copies:
            if copy is not None:
                copy.hold_memory(())

    def current_copies(self, originals: Sequence[Tensor]) -> list[Tensor]:
        """Return the flat memory of each copy, if ``kept``; none where originals were replaced or written since."""
        versions = list(zip(map(weakref.ref, originals), versions_of(originals)))
        copies = [copy for copy in self._copies if copy is not None and copy.is_of(versions, originals)]
        return [copy.flat for copy in copies] if len(copies) == len(self._copies) else []

    def _writable(self, replica: int, versions: list[_Version]) -> "_Copy":
        """Return memory for a copy: that in use, unless what is in it is still needed."""
        current = self._copies[replica]
        if current is not None:
            current.age(versions)
            if not (self._awaits_backward() if self._fixed else current.is_held()):
                return current
        flat = self._plan.make_flat(self.devices[replica])
        # .data gives each slot a version counter of its own.
        return _Copy(flat, [view.data for view in self._plan.views(flat)], versions)

    def _awaits_backward(self) -> bool:
        self._uses = [ref for ref in self._uses if (use := ref()) is not None and not use.is_over]
        return bool(self._uses)

    def begin_use(self) -> "Use":
        """Note that a graph has been connected; it says when its backward has run, or disappears."""
        use = Use()
        if self._fixed:
            self._uses.append(weakref.ref(use))
        return use

    def _sum_flat(self, grads: Sequence[Grads], which: Sequence[int]) -> list[Tensor]:
        if not which:
            return []
        flats = [self._plan.flatten(dict(zip(which, row)), device) for row, device in _on_devices(grads)]
        total = comm.reduce(flats, self.device)
        return [self._plan.slots[k].view(total) for k in which]


class _Copy:
    """A bucket's tensors on one device."""

    def __init__(self, flat: Tensor, slots: list[Tensor], versions: list[_Version]) -> None:
        self.flat = flat
        self.slots = slots
        self._versions = versions
        self._own_uses = num_storage_uses(flat)
        self._memory: list[Tensor] = []

    def age(self, versions: list[_Version]) -> None:
        """Tell autograd which originals were written since: a backward through their values is torch's error.

        An original that was replaced is not one that was written: what is in its slot is still its value.
        """
        pairs = zip(self.slots, self._versions, versions)
        moved = [slot for slot, (was, v), (now, w) in pairs if was() is now() and v != w]
        if moved:
            increment_version(moved)
        self._versions = versions

    def hold_memory(self, originals: Sequence[Tensor]) -> None:
        """Keep the originals' memory alive: while it is, no other has its address."""
        self._memory = [t.detach() for t in originals]

    def is_of(self, versions: list[_Version], originals: Sequence[Tensor]) -> bool:
        """Tell whether the originals are the same tensors, in the same memory and as often written, as at the copy."""
        pairs = zip(self._versions, versions)
        in_place = [t.data_ptr() for t in self._memory] == [t.data_ptr() for t in originals]
        return in_place and all(was() is now() and v == w for (was, v), (now, w) in pairs)

    def is_held(self) -> bool:
        """Tell whether something else, such as a graph before its backward, refers to this memory."""
        return num_storage_uses(self.flat) > self._own_uses


def _on_devices(grads: Sequence[Grads]) -> Iterator[tuple[Grads, torch.device]]:
    """Pair each replica's gradients with the device they are on, leaving out replicas that have none."""
    for row in grads:
        device = next((g.device for g in row if g is not None), None)
        if device is not None:
            yield row, device


class _Broadcast(torch.autograd.Function):
    """Connect a bucket's slots to the originals."""

    @staticmethod
    def forward(ctx: Any, bucket: Bucket, replicas: Any, slots: Any, *originals: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bucket = bucket
        ctx.use = bucket.begin_use()
        ctx.width = len(originals)
        ctx.devices = [bucket.devices[i] for i in replicas]
        ctx.streams = Streams(bucket.device, *ctx.devices)
        # Autograd runs a node where its first output is: this one has it add up on the primary device, in step
        # with the gradients it adds to.
        anchor = torch.empty(0, device=bucket.device)
        looks = [SlotAlias(t) for t in originals]
        return anchor, *(look.on(slot) for row in slots for slot, look in zip(row, looks))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Give the replicas' parameters the tangents of the originals."""
        moved = tangents[-ctx.width :]
        anchor = torch.empty(0, device=ctx.bucket.device)
        return anchor, *(None if t is None else comm.copy(t, d, fresh=True) for d in ctx.devices for t in moved)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.use.is_over = True
        rows = [grads[i : i + ctx.width] for i in range(0, len(grads), ctx.width)]
        with ctx.streams.current():
            if torch.is_grad_enabled() or are_batched(grads):
                # create_graph=True: the sum is differentiated again, so it is made of torch's own operations. Batched
                # gradients lie in no memory that could be copied.
                columns = [[g for g in column if g is not None] for column in zip(*rows)]
                totals = [sum_on(column, ctx.bucket.device) if column else None for column in columns]
            else:
                totals = ctx.bucket.sum_grads(rows)
        return (None, None, None, *totals)
