"""What the processes that train together say to each other, by ``torch.distributed``."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from everygpu.ranks.membership import Membership, find_membership

T = TypeVar("T")

logger = logging.getLogger("everygpu")


class Group:
    """The process group of a run. All ranks make the same calls in the same order.

    Args:
        membership: This process's.
        control: A group that sends Python objects and CPU tensors.
    """

    def __init__(self, membership: Membership, control: "dist.ProcessGroup") -> None:
        self.rank, self.size, self.local_rank, self.local_size = membership
        self._control = control

    def gather(self, value: T) -> list[T]:
        """Return what each rank has passed; any value that can be pickled."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def broadcast_object(self, value: T) -> T:
        """Return what rank 0 has passed."""
        found = [value]
        dist.broadcast_object_list(found, src=0, group=self._control)
        return found[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self._control)

    def sum_numbers(self, values: Sequence[float]) -> list[float]:
        """Add numbers up over all ranks, each with its own place."""
        total = torch.tensor(values, dtype=torch.float64, device="cpu")
        dist.all_reduce(total, group=self._control)
        return [float(v) for v in total]

    def union(self, numbers: set[int], limit: int) -> set[int]:
        """Return the numbers that any rank has passed; all are below a limit."""
        found = torch.zeros(limit, dtype=torch.uint8, device="cpu")
        found[list(numbers)] = 1
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._control)
        return set(found.nonzero().flatten().tolist())

    def begin_max(self, number: int) -> Callable[[], int]:
        """Begin to find the largest of the numbers that the ranks pass; return what waits for it and returns it."""
        largest = torch.tensor(number, dtype=torch.int64, device="cpu")
        work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._control, async_op=True)

        def wait() -> int:
            work.wait()
            return int(largest)

        return wait

    def broadcast(self, x: Tensor) -> None:
        """Copy rank 0's contiguous tensor into that of each other rank, in turn with the device's current stream."""
        dist.broadcast(x, src=0, group=self._group_of(x))

    def all_reduce(self, x: Tensor) -> "dist.Work":
        """Begin to add a contiguous tensor up over all ranks, beside the device's current stream.

        Returns:
            What has the current stream wait for the sum, by ``wait()``.
        """
        work: dist.Work = dist.all_reduce(x, group=self._group_of(x), async_op=True)
        return work

    def _group_of(self, x: Tensor) -> "dist.ProcessGroup | None":
        return self._control if x.device.type == "cpu" else None


class SpreadBatch(NamedTuple):
    """A batch of which each rank has some rows."""

    group: Group
    weight: float | Tensor
    """What this rank's gradients will be multiplied by, beside other ranks'."""


_batch: ContextVar[SpreadBatch | None] = ContextVar("everygpu_spread_batch", default=None)


@contextmanager
def forward_of(batch: SpreadBatch) -> Iterator[None]:
    """Have layers within compute over the whole batch."""
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


def batch_of_forward() -> SpreadBatch | None:
    """Return what a layer computes over; None where its rows are all there are."""
    return _batch.get()


def join() -> Group | None:
    """Return the process group of this run, made from the environment if there is none; None for one process alone.

    Every rank has to call it, at the same place.

    Raises:
        RankError: the environment is incomplete.
    """
    membership = find_membership()
    if membership is None:
        return None
    if not dist.is_initialized():
        dist.init_process_group(_backend())
    return _group_in(dist.group.WORLD, membership)


def _backend() -> str:
    if not torch.cuda.is_available():
        return "gloo"
    if dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    logger.warning("ranks: this torch has no NCCL: gradients go through host memory, by gloo, which is slow.")
    return "gloo"


@functools.lru_cache(maxsize=1)
def _group_in(world: "dist.ProcessGroup", membership: Membership) -> Group:
    # A user's group may be NCCL's alone.
    control = world if "gloo" in dist.get_backend_config(world) else dist.new_group(backend="gloo")
    return Group(membership, control)
