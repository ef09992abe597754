"""Tensors side by side in flat buckets: their sizes and layout, memory, copies on several devices, gradients back."""

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from everygpu import comm
from everygpu.comm.streams import Streams
from everygpu.errors import OptionError
from everygpu.torch_private.core import are_batched, foreach_copy_, make_subclass

MIB = 2**20

REPLICA_BYTES = 25 * MIB
"""Parameters on their way to replicas, and gradients back or to other ranks: DistributedDataParallel's default, large
enough for full bandwidth."""

UPDATE_BYTES = 12 * MIB
"""Parameters that one process updates together: large enough for full bandwidth, small enough that the last bucket,
which no backward is left to hide, is soon done."""

NUM_UPDATE_BUCKETS = 48
"""A large model has about this many, which are larger: each costs Python a launch on every device."""


def check_bucket_cap(bucket_cap_mb: float | None, caller: str) -> None:
    """Refuse what is no size with an OptionError."""
    is_number = isinstance(bucket_cap_mb, (int, float)) and not isinstance(bucket_cap_mb, bool)
    if bucket_cap_mb is not None and not (is_number and 0 < bucket_cap_mb < math.inf):
        raise OptionError(
            f"{caller}: bucket_cap_mb must be a finite number of MiB above 0, or None, got {bucket_cap_mb!r}. "
            f"DistributedDataParallel's default is 25."
        )


def replica_bucket_bytes(bucket_cap_mb: float | None) -> int:
    """Return the size at which a bucket of replicas' parameters is closed."""
    return REPLICA_BYTES if bucket_cap_mb is None else _in_bytes(bucket_cap_mb)


def update_bucket_bytes(params: Sequence[Tensor], bucket_cap_mb: float | None, *, over_ranks: bool = False) -> int:
    """Return the size at which a bucket of updated parameters is closed."""
    if bucket_cap_mb is not None:
        return _in_bytes(bucket_cap_mb)
    least = REPLICA_BYTES if over_ranks else UPDATE_BYTES
    return max(least, sum(p.nbytes for p in params) // NUM_UPDATE_BUCKETS)


def _in_bytes(bucket_cap_mb: float) -> int:
    return max(1, int(bucket_cap_mb * MIB))


Grads = Sequence[Tensor | None]

_version = operator.attrgetter("_version")


class Use:
    """Whether a graph still needs values; that ends with its backward, or with the graph."""

    is_over = False


def fill_views(views: Sequence[Tensor], tensors: Grads) -> None:
    """Copy tensors of one dtype into views of flat memory in one call; memory of missing tensors is unchanged."""
    pairs = [(view, t) for view, t in zip(views, tensors) if t is not None]
    if pairs:
        with torch.no_grad():
            foreach_copy_([view for view, _ in pairs], [t for _, t in pairs])


def version_of(t: Tensor) -> int:
    """Return how often torch has counted a write; tensors made in inference mode aren't counted."""
    return 0 if t.is_inference() else t._version


def versions_of(tensors: Collection[Tensor]) -> list[int]:
    """Return ``version_of`` each tensor; it runs in every step."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # one was made in inference mode
        return list(map(version_of, tensors))


def placeholders(originals: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return what replicas see in place of tensors, for each row of slots: their classes and attributes, on these."""
    are_parameters = [isinstance(t, nn.Parameter) for t in originals]
    kinds = [type(t) if is_parameter else Tensor for t, is_parameter in zip(originals, are_parameters)]
    seen = [list(map(make_subclass, kinds, row)) for row in rows]
    for k, attributes in enumerate(map(vars, originals)):
        if attributes or (are_parameters[k] and kinds[k] is Tensor):
            for row in seen:
                vars(row[k]).update(attributes)
                if are_parameters[k] and kinds[k] is Tensor:  # which counts as a parameter by this mark alone
                    row[k]._is_param = True
    return seen


def make_twins(originals: Sequence[Tensor], slots: Sequence[Tensor]) -> list[Tensor]:
    """Return leaf twins of parameters, in slots that have version counters of their own."""
    (twins,) = placeholders(originals, [slots])
    return [t.requires_grad_() for t in twins]


def new_leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return leaves of the same memory, which count writes together: a capture's, with accumulators of its own."""
    return make_twins(tensors, [t.detach() for t in tensors])


def put_back(tensors: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
    """Point tensors at their slots again, without a copy, after ``t.data = …`` has moved them."""
    now, then = list(map(Tensor.data_ptr, tensors)), list(map(Tensor.data_ptr, slots))
    for t, slot, address, place in zip(tensors, slots, now, then) if now != then else ():
        if address != place:
            t.data = slot


BLOCK_NUMEL = 1024
"""Parameters begin at, and chunks are whole multiples of: what one program of an update kernel works on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a parameter lies in its bucket."""

    index: int
    """Which parameter."""
    start: int
    numel: int
    shape: torch.Size
    strides: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.strides, int(flat.storage_offset()) + self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a chunk holds of a parameter."""

    index: int
    """Which parameter."""
    start: int
    """Where the piece begins in the chunk."""
    offset: int
    """Where it begins in the parameter's own memory."""
    numel: int

    @property
    def blocks(self) -> slice:
        """Which of the chunk's blocks it is in; it begins with one."""
        first = self.start // BLOCK_NUMEL
        return slice(first, first - (-self.numel // BLOCK_NUMEL))


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Tensors of one dtype that travel together."""

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    places: tuple[tuple[torch.Size, tuple[int, ...], int], ...]
    """Shape, strides and start of each slot."""
    chunk_numel: int
    num_chunks: int
    has_gaps: bool
    """There are elements that are no parameter's."""

    @property
    def numel(self) -> int:
        return self.chunk_numel * self.num_chunks

    @property
    def num_blocks(self) -> int:
        """Blocks in one chunk."""
        return self.chunk_numel // BLOCK_NUMEL

    def in_chunks(self, num: int) -> "BucketPlan":
        """Return the same layout, cut into another number of chunks, of which each has several of these."""
        return replace(self, chunk_numel=self.numel // num, num_chunks=num)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return all parameters' places in a bucket's memory, in the order of ``slots``."""
        view, begin = flat.as_strided, int(flat.storage_offset())
        return [view(shape, strides, begin + start) for shape, strides, start in self.places]

    def make_flat(self, device: torch.device) -> Tensor:
        """Make a bucket's memory; zeros."""
        return torch.zeros(self.numel, dtype=self.dtype, device=device)

    def make_chunk(self, device: torch.device) -> Tensor:
        """Make a chunk's memory; zeros."""
        return torch.zeros(self.chunk_numel, dtype=self.dtype, device=device)

    def flatten(self, tensors: Mapping[int, Tensor | None], device: torch.device) -> Tensor:
        """Put tensors side by side in new memory on their device, with zeros in gaps and for those that are missing."""
        found = [tensors.get(slot.index) for slot in self.slots]
        has_zeros = self.has_gaps or any(t is None for t in found)
        flat = (torch.zeros if has_zeros else torch.empty)(self.numel, dtype=self.dtype, device=device)
        fill_views(self.views(flat), found)
        return flat

    def pieces(self, chunk: int) -> Iterator[Piece]:
        """List what the ``chunk``-th chunk holds."""
        begin, end = chunk * self.chunk_numel, (chunk + 1) * self.chunk_numel
        for slot in self.slots:
            first, last = max(begin, slot.start), min(end, slot.start + slot.numel)
            if first < last:
                yield Piece(index=slot.index, start=first - begin, offset=first - slot.start, numel=last - first)
            elif slot.numel == 0 and chunk == 0:  # optimizers keep a state for it all the same
                yield Piece(index=slot.index, start=0, offset=0, numel=0)


def plan_buckets(
    params: Sequence[Tensor], num_chunks: int, limit_bytes: int = UPDATE_BYTES, *, whole: bool = False
) -> list[BucketPlan]:
    """Lay parameters out in buckets, in the order in which backward usually finishes them: the last ones first."""
    backwards = range(len(params))[::-1]
    if whole:  # so that the chunks of a bucket have equal sizes
        limit_bytes = max(limit_bytes, num_chunks * max((p.nbytes for p in params), default=0))
    return [
        plan_bucket(params, members, num_chunks, together=together, whole=whole)
        for members, together in group_by_storage(params, backwards, limit_bytes)
    ]


def plan_bucket(
    params: Sequence[Tensor],
    members: Sequence[int],
    num_chunks: int,
    *,
    together: bool = False,
    whole: bool = False,
    unit: int = BLOCK_NUMEL,
) -> BucketPlan:
    """Lay parameters of one dtype out in one bucket.

    Args:
        params: Strided; of any shapes.
        members: Which of them, in order, as indices.
        num_chunks: Devices that share the work.
        together: They lie side by side in one storage, as a recurrent layer's weights, and stay so.
        whole: Each parameter is in one chunk: they are distributed by size, or if ``together`` all in the first.
        unit: Parameters begin at, and chunks are whole multiples of so many elements.
    """
    tensors = [params[i] for i in members]
    if together:
        starts = [int(t.storage_offset()) for t in tensors]
        end = tensors[0].untyped_storage().nbytes() // tensors[0].element_size()
        end *= num_chunks if whole else 1
    else:
        sizes = [-(-t.numel() // unit) * unit for t in tensors]
        if whole:
            starts, end = _distribute(sizes, num_chunks)
        else:
            *starts, end = itertools.accumulate(sizes, initial=0)
    slots = [
        # Strides as the tensor's if it fills its memory, as channels_last does, else contiguous.
        Slot(index=i, start=start, numel=t.numel(), shape=t.shape, strides=torch.empty_like(t, device="meta").stride())
        for i, t, start in zip(members, tensors, starts)
    ]
    chunk_numel = -(-end // (num_chunks * unit)) * unit
    return BucketPlan(
        dtype=tensors[0].dtype,
        slots=tuple(slots),
        places=tuple((slot.shape, slot.strides, slot.start) for slot in slots),
        chunk_numel=chunk_numel,
        num_chunks=num_chunks,
        has_gaps=sum(t.numel() for t in tensors) < chunk_numel * num_chunks,
    )


def _distribute(sizes: Sequence[int], num_chunks: int) -> tuple[list[int], int]:
    """Return where each begins, and the end, in chunks of one length: the largest first, to the emptiest chunk."""
    ends, places = [0] * num_chunks, [(0, 0)] * len(sizes)
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        chunk = ends.index(min(ends))
        places[k] = chunk, ends[chunk]
        ends[chunk] += sizes[k]
    longest = max(ends)
    return [chunk * longest + start for chunk, start in places], longest * num_chunks


def group_tensors(tensors: Sequence[Tensor], key: Callable[[Tensor], Any], limit_bytes: int) -> list[list[int]]:
    """Group the indices of tensors with equal keys, in order; a group is closed at a size, as DDP closes buckets."""
    groups: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for index, t in enumerate(tensors):
        members, size = filling.get(key(t), ([], 0))
        if not members or size >= limit_bytes:
            members, size = [], 0
            groups.append(members)
        members.append(index)
        filling[key(t)] = (members, size + t.nbytes)
    return groups


def group_by_storage(
    tensors: Sequence[Tensor], which: Sequence[int], limit_bytes: int
) -> Iterator[tuple[list[int], bool]]:
    """Yield the indices of tensors that can be sent together, and whether they share one storage that must be kept."""
    owners: dict[tuple[int, torch.dtype, bool], list[int]] = {}
    for i in which:
        t = tensors[i]
        owners.setdefault((t.untyped_storage().data_ptr(), t.dtype, t.requires_grad), []).append(i)
    together = [members for members in owners.values() if _fill_storage([tensors[i] for i in members])]
    yield from ((members, True) for members in together)
    taken = {i for members in together for i in members}
    rest = [i for i in which if i not in taken]
    for members in group_tensors([tensors[i] for i in rest], lambda t: (t.dtype, t.requires_grad), limit_bytes):
        yield [rest[k] for k in members], False


def _fill_storage(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors lie side by side in their one storage, as the weights cuDNN wants for a recurrent layer."""
    if len(tensors) < 2:
        return False
    spans = sorted((t.storage_offset(), t.storage_offset() + t.numel()) for t in tensors)
    apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    # A few views of a large table are not worth copying the table for.
    used = sum(t.nbytes for t in tensors)
    return apart and all(t.is_contiguous() for t in tensors) and 2 * used >= tensors[0].untyped_storage().nbytes()


def broadcast_tensor(x: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """Give every device a copy, the first ``x`` itself if it is there; gradients are summed in their order."""
    with keep_requires_grad(x):
        if x.requires_grad and torch.is_grad_enabled() and len(devices) > 1:
            # Autograd runs a node where its first output is.
            return list(_Copies.apply(comm.with_own_node(x, devices[0]), devices))  # type: ignore[no-untyped-call]
        # Replicas on one device must not share memory: one may write into it.
        return [comm.copy(x, device, fresh=i > 0) for i, device in enumerate(devices)]


def keep_requires_grad(x: Tensor) -> torch.set_grad_enabled:
    """Enable gradients for the parts of an input that requires one, also under ``no_grad``."""
    return torch.set_grad_enabled(
        torch.is_grad_enabled() or (x.requires_grad and not torch.is_inference_mode_enabled())
    )


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
            return (sum_on(present, ctx.home) if present else None), None


def sum_on(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Add tensors up on a device, in the order in which they are given."""
    # Dense + sparse is defined, sparse + dense is not.
    first, *rest = sorted(tensors, key=lambda t: t.layout != torch.strided)
    total = comm.copy(first, device)
    for t in rest:
        total = total + comm.copy(t, device)
    return total


LEAST_ALIGNMENT = 64
"""Bytes: what torch's allocators align memory to, on any device."""

ALIGNMENT_BYTES = 256
"""Slots begin at multiples of this, as cuBLAS and vectorized kernels like it and torch's allocator does."""


def is_plain(t: Tensor) -> bool:
    """Whether a tensor lies in memory as its copies do: the same layout computes the same."""
    return t.stride() == torch.empty_like(t, device="meta").stride() and t.data_ptr() % LEAST_ALIGNMENT == 0


class BroadcastBucket:
    """Tensors of one dtype that travel together.

    Each time they are sent to new memory, one flat tensor per device whose slots have the shapes and strides of the
    originals: what graphs and users still hold of earlier forwards stays as it was.

    Args:
        originals: At least one tensor, all of one dtype and equal in ``requires_grad``; on ``device``.
        keep_storage: Lay the copies out as the originals are in the one storage they share, not side by side.
        fixed: Send to the same addresses, as CUDA graphs need it, unless they take gradients: a backward through other
            values than those of its forward is torch's error then.
        keeps: Remember what was sent, for ``current_copies``.
        trusts_versions: Refresh only when an original or its ``.data`` was replaced, or written as far as torch counts
            it: not in place through ``.data``; after that call ``forget``.
        by_tree: Add gradients up by a tree over the devices' places, ``device`` the first.
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
        by_tree: bool = False,
    ) -> None:
        self.device = device
        self.devices = list(devices)
        unit = 1 if keep_storage else max(1, ALIGNMENT_BYTES // originals[0].element_size())
        self.plan = plan_bucket(originals, range(len(originals)), 1, together=keep_storage, unit=unit)
        self._requires_grad = originals[0].requires_grad
        # Those that take gradients are leaves in captures; elsewhere their old values may yet go backward.
        self._fixed = fixed and not self._requires_grad
        self._keeps = keeps or trusts_versions
        self._trusts_versions = trusts_versions
        self._copies: list[_Copy | None] = [None] * len(self.devices)
        self._by_tree = by_tree

    def refresh(self, originals: Sequence[Tensor], replicas: Sequence[int]) -> list[list[Tensor]]:
        """Return copies of the tensors of now for some of ``devices``; before these, where gradients are added up by a
        tree, what ``device`` has in place of originals that take some.

        They are connected to the originals also while autograd is off: activation checkpointing runs a replica again
        later, when it is on.
        """
        # Outside inference mode, or buffers made in it could never be written by a training step.
        with torch.inference_mode(False):
            with torch.no_grad():
                self._send(originals, replicas)
            slots = [copy.slots for i in replicas if (copy := self._copies[i]) is not None]
            if self._by_tree and self._requires_grad:
                slots.insert(0, [t.detach() for t in originals])
            if not self._requires_grad:
                return placeholders(originals, slots)
            with torch.enable_grad():
                _, *outputs = _Broadcast.apply(self, replicas, slots, *originals)  # type: ignore[no-untyped-call]
        width = len(originals)
        return [outputs[i * width : (i + 1) * width] for i in range(len(slots))]

    def forget(self) -> None:
        """Send at the next refresh, whatever torch has counted."""
        for copy in self._copies:
            if copy is not None:
                copy.is_valid = False

    def current_copies(self, originals: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return each copy; none where originals were replaced or written since."""
        found = [copy.slots for copy in self._copies if copy is not None and copy.is_of(originals)]
        return found if len(found) == len(self.devices) else []

    def sum_grads(self, grads: Sequence[Grads]) -> list[Tensor | None]:
        """Add the replicas' gradients on the primary device, through one flat buffer each; None where none has one."""
        if self._by_tree:
            return self._sum_by_tree(grads)
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

    def sum_column(self, grads: Grads) -> Tensor | None:
        """Add one tensor's gradients up, by autograd."""
        if self._by_tree:
            return comm.tree_sum(grads, self.device)
        found = [g for g in grads if g is not None]
        return sum_on(found, self.device) if found else None

    def _sum_by_tree(self, grads: Sequence[Grads]) -> list[Tensor | None]:
        if len(grads) == 1:
            return list(grads[0])
        columns = list(zip(*grads))
        is_flat = all(g is not None and g.layout is torch.strided for column in columns for g in column)
        if not is_flat or len(columns) == 1:
            return [comm.tree_sum(column, self.device) for column in columns]
        flats = [self.plan.flatten(dict(enumerate(row)), row[0].device) for row in grads if row[0] is not None]
        total = comm.tree_sum(flats, self.device)
        return [] if total is None else list(self.plan.views(total))

    def copy_here(self, originals: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the values on their own device, without gradients, laid out as the others'."""
        with torch.no_grad():
            return [v.data for v in self.plan.views(self.plan.flatten(dict(enumerate(originals)), self.device))]

    def _send(self, originals: Sequence[Tensor], replicas: Sequence[int]) -> None:
        if self._trusts_versions:
            replicas = [i for i in replicas if (copy := self._copies[i]) is None or not copy.is_of(originals)]
        if replicas:
            # Flattened on the primary's current stream; copies wait for that, and for their devices' current streams.
            # So a forward there comes after them, and later writes to the originals after all copies.
            targets = [self._memory_for(i, originals) for i in replicas]
            comm.broadcast(self.plan.flatten(dict(enumerate(originals)), self.device), targets)
            for copy in [c for i in replicas if self._keeps and (c := self._copies[i]) is not None]:
                copy.is_valid = True

    def _memory_for(self, replica: int, originals: Sequence[Tensor]) -> Tensor:
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
        """Note what is sent, and mark the slots as written: a backward through old values is torch's error."""
        self.is_valid = False  # until it is sent
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

    def is_of(self, originals: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that were sent, in the same memory and as often written."""
        return (
            self.is_valid
            and all(map(operator.is_, originals, self._originals))
            and versions_of(originals) == self._versions
            and list(map(Tensor.data_ptr, originals)) == list(map(Tensor.data_ptr, self._memory))
        )


class _Broadcast(torch.autograd.Function):
    """Connect a bucket's slots to the originals."""

    @staticmethod
    def forward(ctx: Any, bucket: BroadcastBucket, replicas: Any, slots: Any, *originals: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bucket = bucket
        ctx.width = len(originals)
        ctx.streams = Streams(bucket.device, *(bucket.devices[i] for i in replicas))
        # Autograd runs a node where its first output is: this one makes it sum on the primary device, in step
        # with the gradients it adds to.
        anchor = torch.empty(0, device=bucket.device)
        return anchor, *itertools.chain.from_iterable(placeholders(originals, slots))

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows = [grads[i : i + ctx.width] for i in range(0, len(grads), ctx.width)]
        with ctx.streams.current():
            if torch.is_grad_enabled() or are_batched(grads):
                # create_graph=True: the sum is differentiated again, so it uses torch's own operations. Batched
                # gradients lie in no memory that could be copied.
                totals = list(map(ctx.bucket.sum_column, zip(*rows)))
            else:
                totals = ctx.bucket.sum_grads(rows)
        return (None, None, None, *totals)


def split_head(head: Sequence[Tensor], memory: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    """Give replicas on one device tensors of their own, in some memory, in place of those that they share.

    Their gradients are added up by a tree, as soon as neighbours have theirs: about log2 of them are alive at once.
    """
    if len(memory) == 1:
        return [head]
    if not head[0].requires_grad:
        return [head, *placeholders(head, memory[1:])]
    half = comm.first_half(len(memory))
    with torch.inference_mode(False), torch.enable_grad():
        found = _Split.apply((memory[0], memory[half]), *head)  # type: ignore[no-untyped-call]
    first, second = found[: len(head)], found[len(head) :]
    return [*split_head(first, memory[:half]), *split_head(second, memory[half:])]


class _Split(torch.autograd.Function):
    """Two rows of tensors in place of one; add their gradients up."""

    @staticmethod
    def forward(ctx: Any, memory: Any, *head: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(itertools.chain.from_iterable(placeholders(head, memory)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        half = len(grads) // 2
        return (None, *map(comm.add_pair, grads[:half], grads[half:]))
