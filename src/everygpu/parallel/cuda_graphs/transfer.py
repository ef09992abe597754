"""A module's trainable parameters on their way to all devices within a capture, and their gradients' way back.

Kernels find each parameter and gradient where it is in memory, block by block.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everygpu import comm
from everygpu.comm.streams import queueing_on, synchronize_streams
from everygpu.parallel.buckets import (
    BLOCK_NUMEL,
    REPLICA_BYTES,
    BucketPlan,
    Grads,
    Slot,
    fill_views,
    group_tensors,
    make_twins,
    new_leaves,
    plan_bucket,
    put_back,
)
from everygpu.parallel.replicas.replica_set import ReplicaLeaves

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What there are kernels for."""

ALIGNMENT_BYTES = 16
"""Of what the kernels load at a time."""


def has_kernels(devices: Sequence[torch.device]) -> bool:
    """Whether there are kernels for devices that reach each other's memory: Windows may have no Triton."""
    return all(d.type == "cuda" for d in devices) and comm.has_triton()


def why_not_sent(params: Sequence[Tensor], devices: Sequence[torch.device]) -> str | None:
    """Say why parameters can't be sent between devices in a capture; on one device nothing is sent."""
    if len(devices) == 1:
        return None
    if not has_kernels(devices):
        return "captures over several GPUs need Triton"
    odd = next((p.dtype for p in params if _as_real(p.detach()).dtype not in DTYPES), None)
    return None if odd is None else f"captures over several GPUs have no kernels for parameters of {odd}"


def addresses(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return where tensors are in memory, for kernels on a device; shape (tensors,), int64."""
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)


def block_lengths(plan: BucketPlan, chunk: int, members: Container[int] | None = None) -> Tensor:
    """Return how many elements of a parameter, one of ``members``, are in each block of a chunk; int32, on the CPU."""
    lengths = torch.zeros(plan.num_blocks, dtype=torch.int32, device="cpu")
    for piece in plan.pieces(chunk):
        if members is not None and piece.index not in members:
            continue
        lengths[piece.blocks] = BLOCK_NUMEL
        if piece.numel % BLOCK_NUMEL:
            lengths[piece.blocks.stop - 1] = piece.numel % BLOCK_NUMEL
    return lengths


def block_addresses(plan: BucketPlan, chunk: int, tensors: Mapping[int, Tensor], missing: int = 0) -> Tensor:
    """Return where a chunk's blocks are, in tensors laid out as their slots or at ``missing``; int64, on the CPU."""
    found = torch.full((plan.num_blocks,), missing, dtype=torch.int64, device="cpu")
    for piece in plan.pieces(chunk):
        if piece.index in tensors:
            steps = (piece.offset + torch.arange(0, piece.numel, BLOCK_NUMEL, device="cpu")) * plan.dtype.itemsize
            found[piece.blocks] = tensors[piece.index].data_ptr() + steps
    return found


def is_laid_out(t: Tensor, slot: Slot) -> bool:
    """Whether a tensor's memory is in the order of a slot, and aligned as kernels need it."""
    return t.stride() == slot.strides and t.data_ptr() % ALIGNMENT_BYTES == 0


def lay_out(grad: Tensor | None, slot: Slot, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a gradient, or zeros, laid out as its parameter's slot, in its parameter's dtype: itself, most often."""
    if grad is not None and grad.dtype is dtype and is_laid_out(grad, slot):
        return grad
    laid = torch.full((slot.numel,), -0.0, dtype=dtype, device=device)  # what it is added to stays what it is
    if grad is not None:
        laid.as_strided(slot.shape, slot.strides).copy_(grad)
    return laid


def send_blocks(
    plan: BucketPlan,
    devices: Sequence[torch.device],
    sources: Sequence[Tensor],
    lengths: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> None:
    """Broadcast the blocks of each device's chunk, on the current streams; tables as for ``kernels.run_send``."""
    from everygpu.comm import kernels  # needs Triton, which not every machine has

    for rank, (d, *tables) in enumerate(zip(devices, sources, lengths, targets)):
        with queueing_on(d):
            begin = rank * plan.chunk_numel
            kernels.run_send(*tables, dtype=plan.dtype, block=BLOCK_NUMEL, begin=begin, rank=rank)


def add_blocks(
    plan: BucketPlan,
    devices: Sequence[torch.device],
    sources: Sequence[Tensor],
    lengths: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    index: int,
    first: int = 0,
    by_tree: bool = False,
    notes: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Reduce the blocks of each device's chunk there, on the current streams; tables as for ``kernels.run_add``, and
    what else that takes, for each device. ``first`` is the first one's place in ``sources``.
    """
    from everygpu.comm import kernels

    for rank, (d, *tables) in enumerate(zip(devices, sources, lengths, targets)):
        with queueing_on(d):
            kernels.run_add(
                *tables,
                dtype=plan.dtype,
                block=BLOCK_NUMEL,
                begin=rank * plan.chunk_numel,
                index=index,
                rank=first + rank,
                by_tree=by_tree,
                **{name: row[rank] for name, row in (notes or {}).items()},
            )


class GradTables:
    """Tables of the addresses of replicas' gradients on ``sources``, for each of ``readers``, which has a chunk.

    They are filled after the capture, whose memory stays where it is; ``missing`` is where there is no gradient.
    """

    def __init__(
        self,
        plan: BucketPlan,
        readers: Sequence[torch.device],
        sources: Sequence[torch.device],
        missing: Sequence[int] | None = None,
    ) -> None:
        self._plan = plan
        self._sources = list(sources)
        self._missing = missing or [0] * len(readers)
        self._grads: list[dict[int, Tensor]] = [{} for _ in sources]
        shape = len(sources), plan.num_blocks
        self.tables = [torch.zeros(shape, dtype=torch.int64, device=d) for d in readers]
        """For each reader, the addresses of all replicas' gradients for the blocks of its chunk."""

    def take(self, replica: int, grads: Mapping[int, Tensor | None]) -> bool:
        """Keep a replica's gradients where they are, or lay them out, or zeros, on the current stream. Return whether
        any were made: these are ready later than backward's own.
        """
        plan, device = self._plan, self._sources[replica]
        slots = [slot for slot in plan.slots if slot.index in grads]
        taken = {slot.index: lay_out(grads[slot.index], slot, plan.dtype, device) for slot in slots}
        self._grads[replica].update(taken)
        return any(t is not grads[i] for i, t in taken.items())

    def write(self) -> None:
        """Fill the tables, which in a capture would be part of each replay; and let go of the gradients, whose memory
        the capture keeps.
        """
        for rank, (table, missing) in enumerate(zip(self.tables, self._missing)):
            table.copy_(torch.stack([block_addresses(self._plan, rank, grads, missing) for grads in self._grads]))
        self._grads = [{} for _ in self._sources]


class ParamGroup:
    """Parameters of one dtype, with a leaf twin of each on every device after the first, in flat memory that stays.

    Each device after the first has a chunk of the group. It reads its parameters from the first device and writes
    them to all twins; and it adds its gradients up, and writes the sums to the first. That one's links carry all
    parameters out and all sums in, so it has no chunk, unless it is alone. Alone, and without kernels, gradients are
    copied.

    ``sum_ptrs`` are tables, for each device: at ``index`` they say where this group's sums go.
    """

    def __init__(
        self,
        originals: Sequence[Tensor],
        devices: Sequence[torch.device],
        sum_ptrs: Sequence[Tensor],
        index: int,
        *,
        by_tree: bool = False,
    ) -> None:
        self.by_tree = by_tree
        self.originals = list(originals)
        self.devices = list(devices)
        self.first_worker = min(1, len(devices) - 1)
        """The devices from here on have chunks."""
        self.workers = self.devices[self.first_worker :]
        self.sum_ptrs = sum_ptrs[self.first_worker :]
        self.index = index
        reals = [_as_real(t.detach()) for t in originals]
        self.plan = plan = plan_bucket(reals, range(len(reals)), len(self.workers))
        flats = [plan.make_flat(d) for d in devices[1:]]
        # .data gives each a version counter of its own.
        self._slots = [[v.data for v in self._views(flat)] for flat in flats]
        self.twins = [make_twins(originals, slots) for slots in self._slots]
        self.copied = None if has_kernels(devices) and plan.dtype in DTYPES else plan.make_flat(devices[0])
        """Where each replay puts the sums, without kernels."""
        self.lengths = [block_lengths(plan, rank).to(d) for rank, d in enumerate(self.workers)]
        self.zeros = [torch.full((BLOCK_NUMEL,), -0.0, dtype=plan.dtype, device=d) for d in self.workers]
        """Zeros, read in place of missing gradients."""
        # Kernels read what is laid out otherwise, as a recurrent layer's weights may be, from a copy.
        sources = [lay_out(t, slot, plan.dtype, devices[0]) for t, slot in zip(reals, plan.slots)]
        self._staged = [
            (t, laid.as_strided(slot.shape, slot.strides))
            for t, laid, slot in zip(reals, sources, plan.slots)
            if laid.data_ptr() != t.data_ptr()
        ]
        memory = dict(enumerate(sources))
        self._sources = [block_addresses(plan, rank, memory).to(d) for rank, d in enumerate(self.workers)]
        self._targets = [addresses(flats, d) for d in self.workers]
        self._total: Tensor | None = None

    def leaves(self) -> list[list[Tensor]]:
        """Return for each device what a capture takes gradients of.

        On the first device not the parameters themselves, but leaves of the same memory, which count writes together:
        autograd accumulates the parameters' gradients on streams outside the capture.
        """
        return [new_leaves(self.originals), *self.twins]

    def put_back(self, leaves: Sequence[Sequence[Tensor]], homes: Sequence[Tensor]) -> None:
        """Move leaves back to their first memory, the first device's to ``homes``: recurrent layers move them."""
        for tensors, slots in zip(leaves, [homes, *self._slots]):
            put_back(tensors, slots)

    def stage(self) -> None:
        """Copy what kernels can't read where it is."""
        fill_views([laid for _, laid in self._staged], [t for t, _ in self._staged])

    def send(self) -> None:
        """Bring the twins up to date, on the current streams, which must have met, and must meet afterwards."""
        if self._slots:
            send_blocks(self.plan, self.workers, self._sources, self.lengths, self._targets)

    def allocate_sums(self) -> int:
        """Before a replay, allocate memory for its sums on the current stream; return the address."""
        self._total = self.copied
        if self._total is None:
            self._total = torch.empty(self.plan.numel, dtype=self.plan.dtype, device=self.devices[0])
        return self._total.data_ptr()

    def totals(self) -> list[Tensor]:
        """Return the last sums, in memory of their own on the first device."""
        total, self._total = self._total, None
        assert total is not None  # noqa: S101 - ``allocate_sums`` has made it
        return self._views(total if self.copied is None else total.clone())

    def _views(self, flat: Tensor) -> list[Tensor]:
        views = self.plan.views(flat)
        return [torch.view_as_complex(v) for v in views] if self.originals[0].is_complex() else views


class GradReducer:
    """Sums a group's gradients in one capture, where backward has left them: its memory stays where it is."""

    def __init__(self, group: ParamGroup) -> None:
        self._group = group
        missing = [zeros.data_ptr() for zeros in group.zeros]
        self._sources = GradTables(group.plan, group.workers, group.devices, missing)
        self._copied: Grads = []

    def take(self, grads: Sequence[Grads]) -> list[int]:
        """Take each device's gradients, None where one took no part, where backward has left them, on the current
        streams; return the replicas some of whose gradients were made only now.
        """
        rows = [{i: _as_real(g) for i, g in enumerate(row) if g is not None} for row in grads]
        if self._group.copied is not None:
            self._copied = [rows[0].get(i) for i in range(len(grads[0]))]
            return []
        are_made = [self._sources.take(j, row) for j, row in enumerate(rows)]
        # Conjugated ones were.
        return [j for j, is_made in enumerate(are_made) if is_made or self._group.originals[0].is_complex()]

    def run(self) -> None:
        """Queue the additions on the current streams, without making memory there: see ``MultiGpuGraph.capture``."""
        # These are side streams, see ``ReadyEvents.run_overlapped``: each has waited for the event after every
        # replica's last gradient of the group, and the devices' own streams wait for all of them at the end.
        group = self._group
        if group.copied is not None:
            if any(g is None for g in self._copied):
                group.copied.zero_()
            fill_views(group.plan.views(group.copied), self._copied)
            return
        tables, first = self._sources.tables, group.first_worker
        where: dict[str, Any] = {"index": group.index, "first": first, "by_tree": group.by_tree}
        add_blocks(group.plan, group.workers, tables, group.lengths, group.sum_ptrs, **where)

    def finish(self) -> None:
        """After the capture, before its first replay: do what couldn't be part of it, and let go of the gradients."""
        self._sources.write()
        self._copied = []


class ParameterSync:
    """Trainable parameters in groups, in the order in which backward usually finishes them: the last ones first.

    One that comes late would hold up those after it.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        devices: Sequence[torch.device],
        limit_bytes: int = REPLICA_BYTES,
        *,
        by_tree: bool = False,
    ) -> None:
        self.params = list(params)
        self._devices = list(devices)
        self._layout_key = _layout_key(params)
        comm.connect(devices)
        backwards = self.params[::-1]
        groups = group_tensors(backwards, lambda p: p.dtype, limit_bytes)
        self._sum_ptrs = [torch.zeros(len(groups), dtype=torch.int64, device=d) for d in devices]
        self.groups = [
            ParamGroup([backwards[i] for i in members], devices, self._sum_ptrs, index, by_tree=by_tree)
            for index, members in enumerate(groups)
        ]
        self._load_kernels()

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Whether these are the parameters it was made for, where they were."""
        return _layout_key(params) == self._layout_key

    def twins(self) -> ReplicaLeaves:
        """Return each parameter's twins on the devices after the first, by the parameter's ``id``."""
        return {id(p): twins for b in self.groups for p, *twins in zip(b.originals, *b.twins)}

    def send(self) -> None:
        """Bring the twins up to date, on the devices' current streams."""
        # The streams meet twice: kernels on the workers' streams read what the first device's stream has staged, and
        # what replicas compute on their own streams reads twins that another device's kernels have written.
        for group in self.groups:
            group.stage()
        synchronize_streams(self._devices)
        for group in self.groups:
            group.send()
        synchronize_streams(self._devices)

    def make_reducers(self) -> list[GradReducer]:
        """Make the reductions of one capture, one per group, before it begins."""
        return [GradReducer(group) for group in self.groups]

    def allocate_sums(self) -> None:
        """Before a replay, allocate memory for its sums, which the user will own."""
        places = torch.tensor([b.allocate_sums() for b in self.groups], dtype=torch.int64, device="cpu")
        on_gpus = self._devices[0].type == "cuda"
        places = places.pin_memory() if on_gpus else places
        for d, table in zip(self._devices, self._sum_ptrs):
            with queueing_on(d):
                table.copy_(places, non_blocking=on_gpus)

    @torch.no_grad()
    def _load_kernels(self) -> None:
        """Run everything once: kernels are compiled and loaded now, as while capturing that may be forbidden."""
        self.send()
        self.allocate_sums()
        for group, total in zip(self.groups, self.make_reducers()):
            total.take([[None] * len(group.originals)] * len(self._devices))
            total.finish()
            total.run()
        synchronize_streams(self._devices)  # before memory is let go that others write to
        self.totals([False] * len(self.params))

    def totals(self, reached: Sequence[bool]) -> list[Tensor | None]:
        """Return the last sums in the parameters' order; None for those that are not ``reached``, by group."""
        members = [p for group in self.groups for p in group.originals]
        sums = [t for group in self.groups for t in group.totals()]
        found = {id(p): t if is_reached else None for p, t, is_reached in zip(members, sums, reached)}
        return [found[id(p)] for p in self.params]


def _as_real(t: Tensor) -> Tensor:
    """Return a complex tensor as kernels see it: twice as many numbers."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def _layout_key(params: Sequence[Tensor]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(id(p), p.data_ptr(), p.stride()) for p in params]
