"""Tensors handed from the primary device to the others, and their gradients added up on the way back."""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from everygpu import comm
from everygpu.torch_private.tensors import foreach_copy_, make_subclass, num_storage_uses

# Slots begin at multiples of this, as cuBLAS and vectorized kernels like it and torch's allocator does.
ALIGNMENT_BYTES = 256

Grads = Sequence[Tensor | None]

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
    ) -> None:
        self.device = device
        self.devices = list(devices)
        self._dtype = originals[0].dtype
        self._requires_grad = originals[0].requires_grad
        self._metas = [(t.shape, dense_strides(t)) for t in originals]
        self._offsets, self._numel = storage_offsets(originals) if keep_storage else aligned_offsets(originals)
        self._has_gaps = sum(t.numel() for t in originals) < self._numel
        self._fixed = fixed
        self._trust_versions = trust_versions
        self._uses: list[weakref.ref[_Use]] = []
        self._copies: list[_Copy | None] = [None] * len(self.devices)

    def refresh(self, originals: Sequence[Tensor], replicas: Sequence[int]) -> list[list[Tensor]]:
        """Bring copies up to date.

        Args:
            originals: The tensors now, shaped as at construction.
            replicas: Which of ``devices`` to serve; nobody may hold on to what they were given last, but graphs
                that have yet to run backward.
        Returns:
            For each of ``replicas``, its tensors; connected to ``originals``, also while autograd is off:
            activation checkpointing runs a replica again later, when it is on.
        """
        # Outside inference mode, or buffers made in it could never be written by a training step.
        with torch.inference_mode(False), torch.no_grad():
            self._transfer(originals, replicas)
            slots = [copy.slots for i in replicas if (copy := self._copies[i]) is not None]
            with torch.set_grad_enabled(self._requires_grad):
                _, *outputs = _Broadcast.apply(self, replicas, slots, *originals)  # type: ignore[no-untyped-call]
        width = len(originals)
        return [outputs[i * width : (i + 1) * width] for i in range(len(slots))]

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
        versions = [_version(t) for t in originals]
        if self._trust_versions:
            replicas = [i for i in replicas if (copy := self._copies[i]) is None or not copy.is_of(versions, originals)]
            if not replicas:
                return
        targets = [self._writable(i, versions) for i in replicas]
        source = self._flatten(originals, self.device, range(len(originals)))
        comm.broadcast(source, [target.flat for target in targets])
        for i, target in zip(replicas, targets):
            current = self._copies[i]
            if current is None or (current is not target and not _equal_bytes(current.flat, target.flat)):
                self._copies[i] = target
            if self._trust_versions and (copy := self._copies[i]) is not None:
                copy.hold_memory(originals)

    def forget(self) -> None:
        """Send at the next refresh, whatever torch has counted."""
        for copy in self._copies:
            if copy is not None:
                copy.hold_memory(())

    def _writable(self, replica: int, versions: list[_Version]) -> "_Copy":
        """Return memory for a copy: that in use, unless someone still needs what is in it."""
        current = self._copies[replica]
        if current is not None:
            current.age(versions)
            if not (self._awaits_backward() if self._fixed else current.is_held()):
                return current
        flat = torch.zeros(self._numel, dtype=self._dtype, device=self.devices[replica])
        # .data gives each slot a version counter of its own.
        return _Copy(flat, [view.data for view in self._views(flat, range(len(self._metas)))], versions)

    def _awaits_backward(self) -> bool:
        self._uses = [ref for ref in self._uses if (use := ref()) is not None and not use.is_over]
        return bool(self._uses)

    def begin_use(self) -> "_Use":
        """Note that a graph has been connected; it says when its backward has run, or disappears."""
        use = _Use()
        if self._fixed:
            self._uses.append(weakref.ref(use))
        return use

    def _views(self, flat: Tensor, which: Sequence[int]) -> list[Tensor]:
        return [flat.as_strided(*self._metas[k], self._offsets[k]) for k in which]

    def _flatten(self, tensors: Grads, device: torch.device, which: Sequence[int]) -> Tensor:
        missing = self._has_gaps or len(which) < len(self._metas) or any(t is None for t in tensors)
        make = torch.zeros if missing else torch.empty
        flat = make(self._numel, dtype=self._dtype, device=device)
        fill_views(self._views(flat, which), tensors)
        return flat

    def _sum_flat(self, grads: Sequence[Grads], which: Sequence[int]) -> list[Tensor]:
        if not which:
            return []
        flats = [self._flatten(row, device, which) for row, device in _on_devices(grads)]
        return self._views(comm.reduce(flats, self.device), which)


class _Use:
    """A graph's interest in a bucket's values, which ends with its backward or with the graph."""

    is_over = False


class _Copy:
    """A bucket's tensors on one device."""

    def __init__(self, flat: Tensor, slots: list[Tensor], versions: list[_Version]) -> None:
        self.flat = flat
        self.slots = slots
        self._versions = versions
        self._own_uses = num_uses(flat)
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
        """Tell whether anyone else, such as a graph before its backward, refers to this memory."""
        return num_uses(self.flat) > self._own_uses


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
    with keep_requires_grad(x):
        if x.requires_grad and torch.is_grad_enabled() and len(devices) > 1:
            return list(_Copies.apply(x, devices))  # type: ignore[no-untyped-call]
        # Replicas on one device must not share memory: one may write into it.
        return [comm.copy(x, device, fresh=i > 0) for i, device in enumerate(devices)]


@contextmanager
def keep_requires_grad(x: Tensor) -> Iterator[None]:
    """Record what is made of an input that takes a gradient, also under ``no_grad``: the parts take one too."""
    record = torch.is_grad_enabled() or (x.requires_grad and not torch.is_inference_mode_enabled())
    with torch.set_grad_enabled(record):
        yield


class _Broadcast(torch.autograd.Function):
    """Connect a bucket's slots to the originals."""

    @staticmethod
    def forward(ctx: Any, bucket: Bucket, replicas: Any, slots: Any, *originals: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bucket = bucket
        ctx.use = bucket.begin_use()
        ctx.width = len(originals)
        ctx.streams = Streams(bucket.device, *(bucket.devices[i] for i in replicas))
        # Autograd runs a node where its first output is: this one has it add up on the primary device, in step
        # with the gradients it adds to.
        anchor = torch.empty(0, device=bucket.device)
        looks = [SlotAlias(t) for t in originals]
        return anchor, *(look.on(slot) for row in slots for slot, look in zip(row, looks))

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.use.is_over = True
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
        return tuple(comm.copy(x.detach(), d, fresh=i > 0) for i, d in enumerate(devices))

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
    total = comm.copy(first, device)
    for t in rest:
        total = total + comm.copy(t, device)
    return total


def version_of(t: Tensor) -> int:
    """Return how often torch has counted a write; tensors made in inference mode aren't counted."""
    return 0 if t.is_inference() else t._version


def _version(t: Tensor) -> _Version:
    return weakref.ref(t), version_of(t)


def fill_views(views: Sequence[Tensor], tensors: Grads) -> None:
    """Copy tensors of one dtype into views of flat memory, at once; where there is none, the memory stays as it is."""
    pairs = [(view, t) for view, t in zip(views, tensors) if t is not None]
    if pairs:
        foreach_copy_([view for view, _ in pairs], [t.detach() for _, t in pairs])


class SlotAlias:
    """What replicas see in place of a tensor: its class and attributes, on a slot's memory."""

    __slots__ = ("attributes", "kind", "mark")

    def __init__(self, original: Tensor) -> None:
        is_parameter = isinstance(original, nn.Parameter)
        self.kind = type(original) if is_parameter else Tensor
        self.attributes = dict(vars(original))
        # A plain tensor may count as a parameter by this mark alone.
        self.mark = is_parameter and self.kind is Tensor

    def on(self, slot: Tensor) -> Tensor:
        seen = make_subclass(self.kind, slot)
        if self.attributes:
            vars(seen).update(self.attributes)
        if self.mark:
            seen._is_param = True
        return seen


def num_uses(flat: Tensor) -> int:
    """Count the tensors that refer to a buffer's memory."""
    return num_storage_uses(flat)


def _equal_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def keeps_storage(tensors: Sequence[Tensor]) -> bool:
    """Tell whether tensors lie side by side in one storage, as the weights cuDNN wants for a recurrent layer."""
    if len(tensors) < 2 or len({t.untyped_storage().data_ptr() for t in tensors}) > 1:
        return False
    spans = sorted((t.storage_offset(), t.storage_offset() + t.numel()) for t in tensors)
    apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    # A few views of a large table are not worth copying the table for.
    used = sum(t.nbytes for t in tensors)
    return apart and all(t.is_contiguous() for t in tensors) and 2 * used >= tensors[0].untyped_storage().nbytes()


def storage_offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    size = tensors[0].untyped_storage().nbytes() // tensors[0].element_size()
    return [int(t.storage_offset()) for t in tensors], size


def aligned_offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where tensors of one dtype begin in a flat buffer, and where the last one's room ends, in elements."""
    step = max(1, ALIGNMENT_BYTES // tensors[0].element_size())
    offsets, end = [], 0
    for t in tensors:
        offsets.append(end)
        end += -(-t.numel() // step) * step
    return offsets, end


def dense_strides(t: Tensor) -> tuple[int, ...]:
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


def group_by_storage(
    tensors: Sequence[Tensor], which: Sequence[int], limit_bytes: int
) -> Iterator[tuple[list[int], bool]]:
    """Put tensors together that can travel together.

    Args:
        tensors: Strided.
        which: Those to group, in order, as indices.
        limit_bytes: Size at which a group is closed.
    Yields:
        The indices of each group, and whether its members lie in one storage that is to be kept.
    """
    owners: dict[tuple[int, torch.dtype, bool], list[int]] = {}
    for i in which:
        t = tensors[i]
        owners.setdefault((t.untyped_storage().data_ptr(), t.dtype, t.requires_grad), []).append(i)
    together = [members for members in owners.values() if keeps_storage([tensors[i] for i in members])]
    yield from ((members, True) for members in together)
    taken = {i for members in together for i in members}
    rest = [i for i in which if i not in taken]
    for members in group([tensors[i] for i in rest], lambda t: (t.dtype, t.requires_grad), limit_bytes):
        yield [rest[k] for k in members], False
