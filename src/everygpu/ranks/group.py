"""Communication between the processes that train together, by ``torch.distributed``."""

import functools
import logging
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from everygpu import tree
from everygpu.errors import RankError
from everygpu.progress import running
from everygpu.ranks.membership import Membership, find_membership
from everygpu.torch_private.core import default_store

if dist.is_available():
    # Imported when there is a group, as by an optimizer's first step, it keeps that: a default of its functions.
    import torch.distributed.nn.functional

logger = logging.getLogger("everygpu")

_MOST_VALUES = 4096
"""Of each tensor, as many are compared."""


class FirstBatch:
    """Warns, once, where all ranks have the same rows in their first batch."""

    def __init__(self) -> None:
        self._is_known = False

    def compare(self, group: "Group", batch: Any) -> None:
        """Compare the ranks' first batches; all ranks call it with theirs, again for later ones, at no cost."""
        if self._is_known or not torch.is_grad_enabled():
            return
        found = group.gather(batch_digest(batch))
        self._is_known = len(found) > 1  # not where each rank is by itself
        if self._is_known and len(set(found)) == 1 and found[0]:
            logger.warning(
                "ranks: all %d ranks got the same rows in their first batch: each step does the work of %d for the "
                "result of one. Distribute the batch by everygpu.Feeder(loader, model), "
                "or give the loader a DistributedSampler.",
                len(found),
                len(found),
            )


def batch_digest(batch: Any) -> int:
    """Return a checksum of the first values of each tensor, which differs between batches; 0 if there are none."""
    found = 0
    for path, x in tree.leaves(batch, ""):
        if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and x.numel():
            found = zlib.crc32(repr((path, x.shape, x.flatten()[:_MOST_VALUES].tolist())).encode(), found)
    return found


T = TypeVar("T")


_POLL_S = 0.02
_END_S, _MEET_S = 10.0, 1.0
"""How long rank 0, and the others, wait for each other at their end: some may have died."""


class Group:
    """The process group of a run. All ranks make the same calls in the same order.

    A rank that fails is found by what has started the ranks, and by NCCL's own watchdog: torchrun ends the others.

    Args:
        membership: This process's.
        control: A group that sends Python objects and CPU tensors.
    """

    def __init__(self, membership: Membership, control: "dist.ProcessGroup") -> None:
        self.rank, self.size, self.local_rank, self.local_size = membership
        self.first_batch = FirstBatch()
        self.reducer: Any = None
        """What averages gradients over ranks, made with the first model."""
        self.sums_by_tree = False
        """All-reduces add up by a tree over ranks, a power of two of them, at the cost of everyone's values on each."""
        self._next_place, self._last_place = 0, (-1, 0)
        self._control: Any = control
        self._of_graph: Any = None
        self._notes: Any = dist.PrefixStore("everygpu/notes", default_store())  # type: ignore[attr-defined]

    @property
    def uses_nccl(self) -> bool:
        """Whether GPUs' tensors go through NCCL."""
        return "cuda:nccl" in dist.get_backend_config()

    def next_place(self) -> int:
        """Number a layer's forward that communicates, in the order in which all ranks come to them."""
        self._next_place += 1
        return self._next_place

    def is_in_order(self, backward: int, place: int) -> bool:
        """Whether a backward comes to the forwards of layers last to first, as on one device per rank it must."""
        (last_backward, last_place), self._last_place = self._last_place, (backward, place)
        return backward != last_backward or place <= last_place

    def check_same(self, what: str, mine: Mapping[str, object]) -> None:
        """Make sure that all ranks have passed the same, as before the first collective over what it names.

        Raises:
            RankError: they differ; on all ranks, with the first difference.
        """
        of_ranks = self.gather(dict(mine))
        for name in dict.fromkeys(name for found in of_ranks for name in found):
            values = [found.get(name, "missing") for found in of_ranks]
            other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                raise RankError(
                    f"ranks: {what} must be the same on all ranks, got {name}: {values[0]} on rank 0, {values[other]} "
                    f"on rank {other}. Have every rank run the same script with the same arguments."
                )

    def gather(self, value: T) -> list[T]:
        """Return what each rank has passed; any value that can be pickled."""
        found: list[Any] = [None] * self._control.size()
        with self._communicating("gather over ranks"):
            dist.all_gather_object(found, value, group=self._control)
        return found

    def broadcast_object(self, value: T) -> T:
        """Return what rank 0 has passed."""
        found = [value]
        with self._communicating("broadcast over ranks"):
            dist.broadcast_object_list(found, src=0, group=self._control)
        return found[0]

    def begin_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start an elementwise maximum over all ranks; return a function that waits for it."""
        largest = torch.tensor(values, dtype=torch.int64, device="cpu")
        work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._control, async_op=True)

        def wait() -> list[int]:
            with self._communicating("maximum over ranks"):
                work.wait()
            return [int(v) for v in largest]

        return wait

    def begin_list(self, value: float) -> Callable[[], list[float]]:
        """Start an all-gather of one number per rank; return a function that waits for the numbers, by rank."""
        numbers = torch.zeros(self._control.size(), dtype=torch.float64, device="cpu")
        numbers[self._control.rank()] = value
        work = dist.all_reduce(numbers, group=self._control, async_op=True)

        def wait() -> list[float]:
            with self._communicating("sum over ranks"):
                work.wait()
            return [float(v) for v in numbers]

        return wait

    def broadcast(self, x: Tensor) -> None:
        """Copy rank 0's contiguous tensor into that of each other rank, in turn with the device's current stream."""
        with self._communicating("broadcast over ranks"):
            dist.broadcast(x, src=0, group=self._group_of(x))

    def all_reduce(self, x: Tensor, *, is_mean: bool = False, in_graph: bool = False) -> Callable[[], None]:
        """Start an all-reduce of a contiguous tensor, a sum or a mean, that overlaps the device's current stream.

        Args:
            x: Written in place.
            is_mean: Average it.
            in_graph: A node of autograd's graph asks for it. Such sums have a communicator of their own: where a rank
                leaves a branch out, its order of sums relative to other collectives differs from other ranks'.
        Returns:
            What waits for the result; on GPUs, it has the current stream wait.
        """
        if self.sums_by_tree:
            return self._sum_by_tree(x, is_mean=is_mean, in_graph=in_graph)
        options = dist.AllreduceOptions()
        if is_mean and x.is_cuda and self.uses_nccl:
            options.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
        elif is_mean:  # gloo has only the sum
            x.div_(self.size)
        # The group's own method: a step makes many of these calls, and dist.all_reduce does more in Python.
        group = self._own_of_graph() if in_graph else self._group_of(x)
        work = group.allreduce([torch.view_as_real(x) if x.is_complex() else x], options)

        def wait() -> None:
            with self._communicating("sum over ranks"):
                work.wait()

        return wait

    def _sum_by_tree(self, x: Tensor, *, is_mean: bool, in_graph: bool) -> Callable[[], None]:
        real = torch.view_as_real(x) if x.is_complex() else x
        parts = [torch.empty_like(real) for _ in range(self.size)]
        group = self._own_of_graph() if in_graph else self._group_of(x)
        work = group.allgather([parts], [real])

        def wait() -> None:
            with self._communicating("sum over ranks"):
                work.wait()
            found = parts
            while len(found) > 1:
                found = [a + b for a, b in zip(found[::2], found[1::2])]
            real.copy_(found[0] / self.size if is_mean else found[0])

        return wait

    def leave_note(self, key: str, text: str) -> None:
        """Write something down for other ranks, which read it when they like; no collective."""
        with self._communicating("note for ranks"):
            self._notes.set(key, text)

    def find_note(self, key: str) -> str | None:
        """Return a note if it has been left by now."""
        with self._communicating("note of a rank"):
            return str(self._notes.get(key).decode()) if self._notes.check([key]) else None

    def find_first_note(self, key: str, other: str) -> str | None:
        """Wait for a note, and return it; None where another one is left before it."""
        while (note := self.find_note(key)) is None:
            if self.find_note(other) is not None:
                return self.find_note(key)
            time.sleep(_POLL_S)
        return note

    def read_note(self, key: str, limit_s: float = math.inf) -> str:
        """Wait for a note of rank 0.

        Raises:
            RankError: rank 0 has left no such note in time.
        """
        limit = time.monotonic() + limit_s
        while (note := self.find_note(key)) is None:
            if time.monotonic() > limit:
                raise RankError(
                    f"ranks: rank 0 must do what rank {self.rank} waits for, {key}, got nothing in {limit_s:g} s. "
                    f"Make the call on all ranks with the same arguments, or on rank 0 alone."
                )
            time.sleep(_POLL_S)
        return note

    @contextmanager
    def _communicating(self, what: str) -> Iterator[None]:
        """Say what a lost connection means."""
        try:
            with running(what, waits_for="ranks"):
                yield
        except RuntimeError as error:  # gloo's, NCCL's and the store's
            raise RankError(
                f"Rank {self.rank} lost the others in a {what}: one has failed or ended. Look for the first error: "
                f"torchrun names its rank."
            ) from error

    def close(self) -> None:
        """Let go of torch's groups, whose threads end with the last reference to them."""
        self._control = self._notes = self._of_graph = None

    def _own_of_graph(self) -> Any:
        if self._of_graph is None:
            self._of_graph = dist.new_group()
        return self._of_graph

    def _group_of(self, x: Tensor) -> Any:
        return self._control if x.device.type == "cpu" else dist.group.WORLD


class OncePerRun(logging.Filter):
    """Leaves warnings and what is below to rank 0; errors come from every rank, and name it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return self._rank == 0
        record.msg = f"rank {self._rank}: {record.msg}"
        return True


def init_group() -> Group | None:
    """Return the process group of this run, made from the environment if needed; None for a single process.

    Every rank has to call it, at the same place.

    Raises:
        RankError: the environment is incomplete.
    """
    membership = find_membership()
    if membership is None:
        return None
    _make_world(membership)
    current, world = _CurrentGroup.of_this_process(), dist.group.WORLD
    if current.group is None or current.world is not world:
        # A user's group may be NCCL's alone.
        control: Any = world if "gloo" in dist.get_backend_config() else dist.new_group(backend="gloo")
        current.group, current.world = Group(membership, control), world
        _leave_at_exit()  # a user's group also has threads that hold our tensors
        for old in [f for f in logger.filters if isinstance(f, OncePerRun)]:
            logger.removeFilter(old)
        logger.addFilter(OncePerRun(membership.rank))
    return current.group


def init_single() -> Group | None:
    """Return the group of a process that was started as the only rank; None for one that was started without ranks.

    Others needn't know of it: to them, one process alone has no group.
    """
    if "RANK" not in os.environ and not dist.is_initialized():
        return None
    membership = Membership(0, 1, 0, 1)
    _make_world(membership)
    _leave_at_exit()
    world: Any = dist.group.WORLD
    return Group(membership, world)


def current_group() -> Group | None:
    """Return the process group of this run if ``init_group`` has made it; not every rank has to call this."""
    return _CurrentGroup.of_this_process().group if dist.is_available() and dist.is_initialized() else None


def _make_world(membership: Membership) -> None:
    """Make torch's process group from the environment, if it doesn't exist."""
    if not dist.is_initialized():
        try:
            # Unlike init_method="env://", it gives each try of torchrun keys of its own, where the store is that of its
            # rendezvous: no addresses are left of processes before a restart.
            store, _, _ = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
            own = dist.PrefixStore(f"everygpu/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)  # type: ignore[attr-defined]
            dist.init_process_group(_backend(), store=own, rank=membership.rank, world_size=membership.size)
        except ValueError as error:
            raise RankError(
                f"ranks: rank {membership.rank} of {membership.size} must find the others, got: {error} Start the "
                f"script by torchrun, make the process group first, or unset RANK."
            ) from error


def _backend() -> str:
    if not torch.cuda.is_available():
        return "gloo"
    if dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    logger.warning("ranks: this torch has no NCCL: gradients go through host memory, by gloo, which is slow.")
    return "gloo"


class _CurrentGroup:
    """This process's group, and the torch group that it was made from."""

    group: Group | None = None
    world: object = None

    @staticmethod
    @functools.cache
    def of_this_process() -> "_CurrentGroup":
        return _CurrentGroup()


@functools.cache
def _leave_at_exit() -> None:
    """Register ``leave`` to run once at exit, also in processes of multiprocessing, where ``atexit`` doesn't run."""
    Finalize(None, leave, exitpriority=0)


def leave() -> None:
    """End the process group that ranks have joined, as NCCL asks for; after an error others may be gone."""
    current = _CurrentGroup.of_this_process()
    if not dist.is_initialized() and current.group is not None:  # the user has ended it: now its last reference goes
        current.group.close()
        current.group = current.world = None
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        # Gloo's threads take the interpreter's lock to let go of tensors: if that comes as the interpreter ends, they
        # abort the process. A rank that ends alone keeps them, as its connections are to end with it, not before:
        # else others would fail first, and be named.
        if current.group is not None and _all_end(current.group):
            current.group.close()
            current.group = current.world = None
        dist.destroy_process_group()


def _all_end(group: Group) -> bool:
    """Whether all ranks come to their end; rank 0 stays for the others where its process has their notes."""
    has_store = group.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun has it
    limit, has_met = time.monotonic() + (_END_S if has_store else _MEET_S), False
    with suppress(RankError):
        group.leave_note(f"rank {group.rank} ends", "")
        for rank in range(group.size):
            group.read_note(f"rank {rank} ends", limit - time.monotonic())
        has_met = True
    with suppress(RankError):
        group.leave_note(f"rank {group.rank} leaves", "")
        for rank in range(group.size) if has_store else ():
            group.read_note(f"rank {rank} leaves", limit - time.monotonic())
    return has_met


_group: ContextVar[Group | None] = ContextVar("everygpu_group_of_forward", default=None)


@contextmanager
def forward_of(group: Group) -> Iterator[None]:
    """Make layers in the block compute over all ranks' batches."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


def group_of_forward() -> Group | None:
    """Return the ranks over whose batches a layer computes; None where this one's rows are all there are."""
    return _group.get()
