"""Tensors handed from the primary device to the others, and their gradients added up on the way back."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from everygpu import comm

# Slots begin at multiples of this, as cuBLAS and vectorized kernels like it and torch's allocator does.
ALIGNMENT_BYTES = 256

Grads = Sequence[Tensor | None]


class Bucket:
    """Tensors of one dtype that travel together, with a persistent copy on every other device.

    A copy is one flat buffer per device; its slots have the shapes and strides of the originals. Refreshing
    writes the buffers in place, so slots keep their addresses. A slot's version counter, which autograd
    checks in backward, moves only when the original's has: two forwards before one backward are fine,
    and a backward through values changed since is torch's usual error.
    """

    def __init__(self, originals: Sequence[Tensor], device: torch.device, devices: Sequence[torch.device]) -> None:
        self.device = device
        self.devices = list(devices)
        self.requires_grad = originals[0].requires_grad
        self._dtype = originals[0].dtype
        self._metas = [(t.shape, _dense_strides(t)) for t in originals]
        self._offsets, self._numel = _offsets(originals)
        self._flats: list[Tensor | None] = [None] * len(self.devices)
        self._slots: list[list[Tensor]] = [[] for _ in self.devices]
        self._seen: list[list[int]] = [[] for _ in self.devices]
        self._kinds = [nn.Parameter if isinstance(t, nn.Parameter) else Tensor for t in originals]

    def refresh(self, originals: Sequence[Tensor], replicas: Sequence[int]) -> list[list[Tensor]]:
        """Bring copies up to date.

        Args:
            originals: The tensors now, shaped as at construction.
            replicas: Which of ``devices`` to serve.
        Returns:
            For each of ``replicas``, its tensors; connected to ``originals`` when autograd records.
        """
        # Outside inference mode, or buffers made in it could never be written by a training step.
        with torch.inference_mode(False), torch.no_grad():
            self._transfer(originals, replicas)
        slots = [self._slots[i] for i in replicas]
        if self.requires_grad and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            _, *outputs = _Broadcast.apply(self, replicas, slots, *originals)  # type: ignore[no-untyped-call]
        else:
            with torch.inference_mode(False):
                outputs = self.present(slots)
                if self.requires_grad:
                    outputs = tuple(t.requires_grad_() for t in outputs)
        width = len(originals)
        return [list(outputs[i * width : (i + 1) * width]) for i in range(len(slots))]

    def present(self, slots: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Make the tensors replicas see: new objects on the slots' memory and version counters."""
        return tuple(Tensor._make_subclass(kind, slot) for row in slots for kind, slot in zip(self._kinds, row))

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
                totals[k] = _sum_on(column, self.device)
        return totals

    def _transfer(self, originals: Sequence[Tensor], replicas: Sequence[int]) -> None:
        for i in replicas:
            if self._flats[i] is None:
                self._flats[i], self._slots[i] = self._allocate(self.devices[i])
                self._seen[i] = [_version(t) for t in originals]
        flats = [flat for i in replicas if (flat := self._flats[i]) is not None]
        comm.broadcast(self._flatten(originals, self.device, range(len(originals))), flats)
        versions = [_version(t) for t in originals]
        for i in replicas:
            moved = [s for s, now, before in zip(self._slots[i], versions, self._seen[i]) if now != before]
            if moved:
                increment_version(moved)
                self._seen[i] = versions

    def _allocate(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        flat = torch.zeros(self._numel, dtype=self._dtype, device=device)
        # .data gives each slot a version counter of its own.
        return flat, [view.data for view in self._views(flat, range(len(self._metas)))]

    def _views(self, flat: Tensor, which: Sequence[int]) -> list[Tensor]:
        return [flat.as_strided(*self._metas[k], self._offsets[k]) for k in which]

    def _flatten(self, tensors: Grads, device: torch.device, which: Sequence[int]) -> Tensor:
        flat = torch.empty(self._numel, dtype=self._dtype, device=device)
        pairs = [(v, t) for v, t in zip(self._views(flat, which), tensors) if t is not None]
        if len(pairs) < len(self._metas):
            flat.zero_()
        if pairs:
            torch._foreach_copy_([v for v, _ in pairs], [t.detach() for _, t in pairs])
        return flat

    def _sum_flat(self, grads: Sequence[Grads], which: Sequence[int]) -> list[Tensor]:
        if not which:
            return []
        flats = [self._flatten(row, device, which) for row, device in _on_devices(grads)]
        return self._views(comm.reduce(flats, self.device), which)


def _on_devices(grads: Sequence[Grads]) -> Iterator[tuple[Grads, torch.device]]:
    """Pair each replica's gradients with the device they are on, leaving out replicas that have none."""
    for row in grads:
        device = next((g.device for g in row if g is not None), None)
        if device is not None:
            yield row, device


def broadcast_tensor(x: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """Give every device a copy of its own; the first keeps ``x`` itself if it is there already.

    Args:
        x: Any shape, dtype and device.
        devices: One or more.
    Returns:
        One tensor per device. Gradients are added up in the order of ``devices``.
    """
    if x.requires_grad and torch.is_grad_enabled() and len(devices) > 1:
        return list(_Copies.apply(x, devices))  # type: ignore[no-untyped-call]
    return [_copy_for(x, device, i) for i, device in enumerate(devices)]


def _copy_for(x: Tensor, device: torch.device, position: int) -> Tensor:
    # Replicas on one device must not share memory: one may write into it.
    return x.to(device, non_blocking=True, copy=position > 0)


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
        return anchor, *bucket.present(slots)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows = [grads[i : i + ctx.width] for i in range(0, len(grads), ctx.width)]
        with ctx.streams.current():
            if torch.is_grad_enabled():
                # create_graph=True: the sum is differentiated again, so it is made of torch's own operations.
                columns = [[g for g in column if g is not None] for column in zip(*rows)]
                totals = [_sum_on(column, ctx.bucket.device) if column else None for column in columns]
            else:
                totals = ctx.bucket.sum_grads(rows)
        return (None, None, None, *totals)


class _Copies(torch.autograd.Function):
    """Copy one tensor to several devices; add the gradients up in their order, whichever is ready first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, devices: Sequence[torch.device]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.home = x.device
        ctx.streams = Streams(x.device, *devices)
        return tuple(x.detach().to(d, non_blocking=True, copy=i > 0) for i, d in enumerate(devices))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        present = [g for g in grads if g is not None]
        with ctx.streams.current():
            return (_sum_on(present, ctx.home) if present else None), None


class Streams:
    """The streams of a forward, made current again in its backward.

    Autograd restores only the stream of the device whose thread runs a node; a node that touches several
    devices needs all of them.
    """

    def __init__(self, *devices: torch.device) -> None:
        cuda = dict.fromkeys(d for d in devices if d.type == "cuda")
        self._streams = [torch.cuda.current_stream(d) for d in cuda]

    @contextmanager
    def current(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield


def _sum_on(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    # Dense + sparse is defined, sparse + dense is not.
    first, *rest = sorted(tensors, key=lambda t: t.layout != torch.strided)
    total = first.to(device)
    for t in rest:
        total = total + t.to(device)
    return total


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    step = max(1, ALIGNMENT_BYTES // tensors[0].element_size())
    offsets, end = [], 0
    for t in tensors:
        offsets.append(end)
        end += -(-t.numel() // step) * step
    return offsets, end


def _dense_strides(t: Tensor) -> tuple[int, ...]:
    """Strides of a copy: those of the tensor if it fills its memory, as channels_last does, else contiguous."""
    return torch.empty_like(t, device="meta").stride()


def group(tensors: Sequence[Tensor], key: Callable[[Tensor], Any], limit_bytes: int) -> list[list[int]]:
    """Put tensors with equal keys together, in order, up to a size per group.

    Returns:
        Indices into ``tensors``; each group holds at least one.
    """
    groups: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for index, t in enumerate(tensors):
        members, size = filling.get(key(t), ([], 0))
        if not members or size + t.nbytes > limit_bytes:
            members, size = [], 0
            groups.append(members)
        members.append(index)
        filling[key(t)] = (members, size + t.nbytes)
    return groups
