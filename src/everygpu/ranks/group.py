"""What the processes that train together say to each other, by ``torch.distributed``."""

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from everygpu.errors import RankError
from everygpu.progress import running
from everygpu.ranks.claims import Claims
from everygpu.ranks.differences import find_difference
from everygpu.ranks.first_batch import FirstBatch
from everygpu.ranks.meeting import open_store
from everygpu.ranks.membership import Membership, find_membership
from everygpu.ranks.peers import serve
from everygpu.ranks.printing import log_once
from everygpu.ranks.sum import Sum
from everygpu.ranks.watch import Watch

T = TypeVar("T")

logger = logging.getLogger("everygpu")

_POLL_S = 0.02


class Group:
    """The process group of a run. All ranks make the same calls in the same order.

    When a rank has failed, each of its calls raises a RankError that says which, and why.

    Args:
        membership: This process's.
        control: A group that sends Python objects and CPU tensors.
        watch: Looks after the other ranks.
    """

    def __init__(self, membership: Membership, control: "dist.ProcessGroup", watch: Watch) -> None:
        self.rank, self.size, self.local_rank, self.local_size = membership
        self.claims, self.first_batch = Claims(), FirstBatch()
        self._control = control
        self._watch = watch
        self._apart: dist.ProcessGroup | None = None

    @property
    def uses_nccl(self) -> bool:
        """Whether GPUs' tensors go through NCCL."""
        return "cuda:nccl" in dist.get_backend_config()

    @contextmanager
    def telling(self, device: "torch.device | str | None" = None) -> Iterator[None]:
        """Tell all ranks of an error in the block, which reaches the caller as it is; put around each public call.

        Args:
            device: Named with the error.
        Raises:
            RankError: a rank has failed: before, or in the block, whose error is the consequence.
        """
        self._watch.check()
        try:
            yield
        except Exception as error:
            if self._apart is not None:
                raise
            reason = self._watch.reason_of(error)
            if reason is not None:
                raise reason from error
            self._watch.tell(error, device)
            raise

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Have each rank be by itself within, as in a trial that may fail on one alone: it is told of no error, and all
        that goes over ranks has this one's part only."""
        alone, before = dist.new_group([self.rank], backend=_backend(), use_local_synchronization=True), self._control
        self._apart = self._control = alone
        try:
            yield
        finally:
            self._apart, self._control = None, before
            dist.destroy_process_group(alone)

    def check_same(self, what: str, value: object) -> None:
        """Make sure that all ranks have passed the same description, as before the first collective over what it names.

        Args:
            what: Named in the error, as "parameters".
            value: Numbers, strings and the like, in lists, tuples and dicts at any depth.
        Raises:
            RankError: they differ; on all ranks, with the first difference.
        """
        difference = find_difference(self.gather(value))
        if difference is not None:
            raise RankError(
                f"ranks: {what} must be the same on all ranks, got {difference}. Have every rank run the same script "
                f"with the same arguments."
            )

    def gather(self, value: T) -> list[T]:
        """Return what each rank has passed; any value that can be pickled."""
        with self._communicating("gather over ranks"):
            return _gather(value, self._control)

    def broadcast_object(self, value: T) -> T:
        """Return what rank 0 has passed."""
        found = [value]
        with self._communicating("broadcast over ranks"):
            dist.broadcast_object_list(found, src=self._first, group=self._control)
        return found[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        with self._communicating("barrier over ranks"):
            dist.barrier(group=self._control)

    def sum_numbers(self, values: Sequence[float]) -> list[float]:
        """Add numbers up over all ranks, each with its own place."""
        total = torch.tensor(values, dtype=torch.float64, device="cpu")
        with self._communicating("sum over ranks"):
            dist.all_reduce(total, group=self._control)
        return [float(v) for v in total]

    def union(self, numbers: set[int], limit: int) -> set[int]:
        """Return the numbers that any rank has passed; all are below a limit."""
        found = torch.zeros(limit, dtype=torch.uint8, device="cpu")
        found[list(numbers)] = 1
        with self._communicating("union over ranks"):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._control)
        return set(found.nonzero().flatten().tolist())

    def begin_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begin to find the largest values over all ranks, each at its place; return what waits for them."""
        largest = torch.tensor(values, dtype=torch.int64, device="cpu")
        work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._control, async_op=True)

        def wait() -> list[int]:
            with self._communicating("maximum over ranks"):
                work.wait()
            return [int(v) for v in largest]

        return wait

    def broadcast(self, x: Tensor) -> None:
        """Copy rank 0's contiguous tensor into that of each other rank, in turn with the device's current stream."""
        with self._communicating("broadcast over ranks"):
            dist.broadcast(x, src=self._first, group=self._group_of(x))

    def all_reduce(self, x: Tensor) -> "Sum":
        """Begin to add a contiguous tensor up over all ranks, beside the device's current stream.

        Returns:
            What has the current stream wait for the sum, by ``wait()``.
        """
        return Sum(dist.all_reduce(x, group=self._group_of(x), async_op=True))

    def leave_note(self, key: str, text: str) -> None:
        """Write something down for other ranks, which read it when they like; no collective."""
        self._watch.news.set(f"note/{key}", text)

    def find_note(self, key: str) -> str | None:
        """Return a note if it has been left by now."""
        with self._communicating("note of a rank"):
            news = self._watch.news
            return str(news.get(f"note/{key}").decode()) if news.check([f"note/{key}"]) else None

    def read_note(self, key: str, limit_s: float = math.inf) -> str:
        """Wait for a note of rank 0.

        Raises:
            RankError: a rank has failed, or rank 0 has ended, or left no such note in time.
        """
        news, limit = self._watch.news, time.monotonic() + limit_s
        while not news.check([f"note/{key}"]):
            self._watch.check()
            has_ended = self._watch.has_ended(0)
            if has_ended or time.monotonic() > limit:
                why = "its end" if has_ended else f"nothing in {limit_s:g} s"
                raise RankError(
                    f"ranks: rank 0 must do what rank {self.rank} waits for, {key}, got {why}. Make the call on all "
                    f"ranks with the same arguments, or on rank 0 alone."
                )
            time.sleep(_POLL_S)
        return str(news.get(f"note/{key}").decode())

    @contextmanager
    def _communicating(self, what: str) -> Iterator[None]:
        """Have a call that fails because of another rank raise what that has failed with."""
        self._watch.check()
        try:
            with running(what, waits_for="ranks"):
                yield
        except RuntimeError as error:
            reason = self._watch.reason_of(error)
            if reason is None:
                raise
            raise reason from error

    def _group_of(self, x: Tensor) -> "dist.ProcessGroup | None":
        return self._control if x.device.type == "cpu" else self._apart

    @property
    def _first(self) -> int:
        return 0 if self._apart is None else self.rank


def join() -> Group | None:
    """Return the process group of this run, made from the environment if there is none; None for one process alone.

    Every rank has to call it, at the same place.

    Raises:
        RankError: the environment is incomplete.
    """
    membership = find_membership()
    if membership is None:
        return None
    is_ours = not dist.is_initialized()
    if is_ours:
        try:
            store = open_store()
        except ValueError as error:
            raise RankError(
                f"ranks: rank {membership.rank} of {membership.size} must find the others, got: {error} Start the "
                f"script by torchrun, make the process group first, or unset RANK."
            ) from error
        dist.init_process_group(_backend(), store=store, rank=membership.rank, world_size=membership.size)
    log_once(membership.rank)
    return _Joined.of_this_process().join(membership, is_ours)


def joined() -> Group | None:
    """Return the process group of this run if ``join`` has made it; not every rank has to call this."""
    return _Joined.of_this_process().group if dist.is_available() and dist.is_initialized() else None


def _backend() -> str:
    if not torch.cuda.is_available():
        return "gloo"
    if dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    logger.warning("ranks: this torch has no NCCL: gradients go through host memory, by gloo, which is slow.")
    return "gloo"


class _Joined:
    """The group that this process has joined, and torch's that it was made of."""

    def __init__(self) -> None:
        self.group: Group | None = None
        self._world: object = None

    @staticmethod
    @functools.cache
    def of_this_process() -> "_Joined":
        return _Joined()

    def join(self, membership: Membership, is_ours: bool) -> Group:
        world = dist.group.WORLD
        if self.group is None or self._world is not world:
            self.group, self._world = _make_group(membership, is_ours), world
        return self.group


def _make_group(membership: Membership, is_ours: bool) -> Group:
    # A user's group may be NCCL's alone.
    control: Any = dist.group.WORLD if "gloo" in dist.get_backend_config() else dist.new_group(backend="gloo")
    store, me = serve(membership.rank)
    watch = Watch(membership.rank, _gather(me, control), store)
    group = Group(membership, control, watch)
    # At exit in any process, also in those of multiprocessing, where ``atexit`` calls nothing.
    Finalize(group, _leave, (watch, is_ours), exitpriority=0)
    return group


def _leave(watch: Watch, is_ours: bool) -> None:
    """Say goodbye; end the process group that ``join`` has made, which NCCL asks for, unless others may be gone."""
    watch.leave()
    if is_ours and watch.failure is None and dist.is_initialized():
        dist.destroy_process_group()


def _gather(value: T, control: "dist.ProcessGroup") -> list[T]:
    found: list[Any] = [None] * control.size()
    dist.all_gather_object(found, value, group=control)
    return found
