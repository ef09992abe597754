"""Tensors handed from the primary device to the others, and their gradients added up on the way back."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from everygpu import comm
from everygpu.parallel.buckets.copies import Streams, sum_on
from everygpu.parallel.buckets.memory import Grads, stand_ins, versions_of
from everygpu.parallel.buckets.plan import plan_bucket
from everygpu.torch_private.core import are_batched

ALIGNMENT_BYTES = 256
"""Slots begin at multiples of this, as cuBLAS and vectorized kernels like it and torch's allocator does."""


class Bucket:
    """Tensors of one dtype that travel together.

    Each time they are sent to new memory, one flat tensor per device whose slots have the shapes and strides of the
    originals: what graphs and users still hold of earlier forwards stays as it was.

    Args:
        originals: At least one tensor, all of one dtype and alike in ``requires_grad``; on ``device``.
        keep_storage: Lay the copies out as the originals are in the one storage they share, not side by side.
        fixed: Send to the same addresses, as CUDA graphs need it, unless they take gradients: a backward through other
            values than those of its forward is torch's error then.
        keeps: Take note of what was sent, for ``current_copies``.
        trusts_versions: Send only when an original or its ``.data`` was replaced, or written as far as torch counts
            it: not in place through ``.data``; after that call ``forget``.
    """

    def __init__(
        self,
        originals: Sequence[Tensor],
        device: torch.device,
        devices: Sequence[torch.device],
        *,
        keep_storage: bool = False,
        fixed: bool = False,
        keeps: bool = False,
        trusts_versions: bool = False,
    ) -> None:
        self.device = device
        self.devices = list(devices)
        unit = 1 if keep_storage else max(1, ALIGNMENT_BYTES // originals[0].element_size())
        self.plan = plan_bucket(originals, range(len(originals)), 1, together=keep_storage, unit=unit)
        self._requires_grad = originals[0].requires_grad
        # Those that take gradients are leaves in recordings; elsewhere their old values may yet go backward.
        self._fixed = fixed and not self._requires_grad
        self._keeps = keeps or trusts_versions
        self._trusts_versions = trusts_versions
        self._copies: list[_Copy | None] = [None] * len(self.devices)

    def refresh(self, originals: Sequence[Tensor], replicas: Sequence[int]) -> list[list[Tensor]]:
        """Return copies of the tensors of now for some of ``devices``.

        They are connected to the originals also while autograd is off: activation checkpointing runs a replica again
        later, when it is on.
        """
        # Outside inference mode, or buffers made in it could never be written by a training step.
        with torch.inference_mode(False):
            with torch.no_grad():
                self._send(originals, replicas)
            slots = [copy.slots for i in replicas if (copy := self._copies[i]) is not None]
            if not self._requires_grad:
                return stand_ins(originals, slots)
            with torch.enable_grad():
                _, *outputs = _Broadcast.apply(self, replicas, slots, *originals)  # type: ignore[no-untyped-call]
        width = len(originals)
        return [outputs[i * width : (i + 1) * width] for i in range(len(slots))]

    def forget(self) -> None:
        """Send at the next refresh, whatever torch has counted."""
        for copy in self._copies:
            if copy is not None:
                copy.is_valid = False

    def current_copies(self, originals: Sequence[Tensor]) -> list[Tensor]:
        """Return the flat memory of each copy; none where originals were replaced or written since."""
        copies = [copy for copy in self._copies if copy is not None and copy.is_of(originals)]
        return [copy.flat for copy in copies] if len(copies) == len(self._copies) else []

    def sum_grads(self, grads: Sequence[Grads]) -> list[Tensor | None]:
        """Add the replicas' gradients on the primary device, through one flat buffer each; None where none has one."""
        columns = [[g for g in column if g is not None] for column in zip(*grads)]
        dense = {k for k, column in enumerate(columns) if column and all(g.layout == torch.strided for g in column)}
        rows = [{k: row[k] for k in dense} for row in grads]
        devices = [next((g.device for g in row.values() if g is not None), None) for row in rows]
        flats = [self.plan.flatten(row, device) for row, device in zip(rows, devices) if device is not None]
        sums = self.plan.views(comm.reduce(flats, self.device)) if flats else []
        return [
            sums[k] if k in dense else sum_on(column, self.device) if column else None
            for k, column in enumerate(columns)
        ]

    def _send(self, originals: Sequence[Tensor], replicas: Sequence[int]) -> None:
        if self._trusts_versions:
            replicas = [i for i in replicas if (copy := self._copies[i]) is None or not copy.is_of(originals)]
        if replicas:
            targets = [self._room(i, originals) for i in replicas]
            comm.broadcast(self.plan.flatten(dict(enumerate(originals)), self.device), targets)

    def _room(self, replica: int, originals: Sequence[Tensor]) -> Tensor:
        """Return memory for a copy: that in use where addresses are fixed."""
        copy = self._copies[replica]
        if copy is None or not self._fixed:
            self._copies[replica] = copy = None  # its memory may be free for this one's
            flat = torch.empty(self.plan.numel, dtype=self.plan.dtype, device=self.devices[replica])
            # .data gives each slot a version counter of its own.
            copy = self._copies[replica] = _Copy(flat, [view.data for view in self.plan.views(flat)])
        if self._fixed or self._keeps:
            copy.take(originals)
        return copy.flat


class _Copy:
    """A bucket's tensors on one device."""

    def __init__(self, flat: Tensor, slots: list[Tensor]) -> None:
        self.flat = flat
        self.slots = slots
        self.is_valid = False
        self._originals: list[Tensor] = []
        self._versions: list[int] = []
        self._memory: list[Tensor] = []

    def take(self, originals: Sequence[Tensor]) -> None:
        """Note what is sent, and tell autograd which slots were: a backward through other values is torch's error."""
        versions, before = versions_of(originals), zip(self._originals, self._versions, self._memory)
        written = [
            slot
            for slot, t, v, (was, w, memory) in zip(self.slots, originals, versions, before)
            if t is not was or v != w or t.data_ptr() != memory.data_ptr()
        ]
        if written:
            increment_version(written)
        # Memory is kept alive: while it is, no other has its address.
        self._originals, self._versions, self._memory = list(originals), versions, [t.detach() for t in originals]
        self.is_valid = True

    def is_of(self, originals: Sequence[Tensor]) -> bool:
        """Tell whether these are the tensors that were sent, in the same memory and as often written."""
        return (
            self.is_valid
            and all(map(operator.is_, originals, self._originals))
            and versions_of(originals) == self._versions
            and list(map(Tensor.data_ptr, originals)) == list(map(Tensor.data_ptr, self._memory))
        )


class _Broadcast(torch.autograd.Function):
    """Connect a bucket's slots to the originals."""

    @staticmethod
    def forward(ctx: Any, bucket: Bucket, replicas: Any, slots: Any, *originals: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bucket = bucket
        ctx.width = len(originals)
        ctx.streams = Streams(bucket.device, *(bucket.devices[i] for i in replicas))
        # Autograd runs a node where its first output is: this one has it add up on the primary device, in step
        # with the gradients it adds to.
        anchor = torch.empty(0, device=bucket.device)
        return anchor, *itertools.chain.from_iterable(stand_ins(originals, slots))

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
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
