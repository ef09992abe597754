"""How a group's parameters get to all devices within a recording, and its gradients back: by kernels, or by copies."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from everygpu import comm
from everygpu.comm.streams import queueing_on
from everygpu.parallel.buckets.memory import Grads, fill_views
from everygpu.parallel.buckets.plan import BLOCK_NUMEL, BucketPlan, plan_bucket
from everygpu.parallel.cuda_graphs.transfer.grad_tables import (
    GradTables,
    addresses,
    block_addresses,
    block_lengths,
    is_laid_out,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What there are kernels for."""


class GradReducer(Protocol):
    """Adds the gradients of a group up in one recording."""

    def take(self, grads: Sequence[Grads]) -> list[int]:
        """Take gradients where backward has left them, on the current streams.

        Args:
            grads: For each device those of its parameters, None where one took no part.
        Returns:
            The replicas some of whose gradients were made only now.
        """

    def run(self) -> None:
        """Queue the additions on the current streams, without making memory there: see ``MultiGpuGraph.record``."""

    def write_tables(self) -> None:
        """After the recording, before its first launch: do what couldn't be part of it."""

    def forget(self) -> None:
        """Let go of the gradients: the recording keeps their memory, which others may share."""


class TransferBackend(Protocol):
    """Moves a group between its originals and their twins."""

    def send(self) -> None:
        """Bring the twins up to date, on the current streams, which must have met, and must meet afterwards."""

    def make_reducer(self) -> GradReducer:
        """Make what adds gradients up in one recording, before it begins."""

    def make_room(self) -> Tensor:
        """Before a launch, return where its sums will be."""

    def hand_over(self, total: Tensor) -> Tensor:
        """Return sums in memory that no launch writes to again."""


def can_use_kernels(originals: Sequence[Tensor], plan: BucketPlan, devices: Sequence[torch.device]) -> bool:
    """Tell whether kernels can move parameters, among devices that reach each other's memory."""
    return all(d.type == "cuda" for d in devices) and comm.has_triton() and fits_kernels(originals, plan)


def fits_kernels(originals: Sequence[Tensor], plan: BucketPlan, _: Sequence[torch.device] = ()) -> bool:
    """Tell whether there are kernels for parameters as these."""
    return plan.dtype in DTYPES and all(is_laid_out(t, slot) for t, slot in zip(originals, plan.slots))


class KernelBackend:
    """Has devices read and write the others' memory: they find every parameter and gradient where it is.

    Each device after the first has a chunk of the group. It reads its parameters from the first device and writes
    them to all twins; and it adds its gradients up, and writes the sums to the first. That one's links carry all
    parameters out and all sums in, so it has no chunk, unless it is alone.

    Args:
        originals: Laid out as their slots.
        flats: The memory of the twins, one for each device after the first.
        devices: One per replica, each once.
        rooms: For each device a table; at ``index``, where this group's sums go.
        index: This group's place in it.
    """

    def __init__(
        self,
        originals: Sequence[Tensor],
        flats: Sequence[Tensor],
        devices: Sequence[torch.device],
        rooms: Sequence[Tensor],
        index: int,
    ) -> None:
        self.devices = list(devices)
        self.first_worker = min(1, len(devices) - 1)
        """The devices from here on have chunks."""
        self.workers = self.devices[self.first_worker :]
        self.plan = plan_bucket(originals, range(len(originals)), len(self.workers))
        self.lengths = [block_lengths(self.plan, rank).to(d) for rank, d in enumerate(self.workers)]
        self.rooms = rooms[self.first_worker :]
        self.index = index
        self.zeros = [torch.zeros(BLOCK_NUMEL, dtype=self.plan.dtype, device=d) for d in self.workers]
        """Read in place of gradients that there are none of."""
        self._flats = list(flats)
        memory = dict(enumerate(originals))
        self._sources = [block_addresses(self.plan, rank, memory).to(d) for rank, d in enumerate(self.workers)]
        self._targets = [addresses(flats, d) for d in self.workers]

    def send(self) -> None:
        from everygpu.comm import kernels  # needs Triton, which not every machine has

        for rank, d in enumerate(self.workers if self._flats else ()):
            with queueing_on(d):
                kernels.run_send(
                    self._sources[rank],
                    self.lengths[rank],
                    self._targets[rank],
                    dtype=self.plan.dtype,
                    block=BLOCK_NUMEL,
                    begin=rank * self.plan.chunk_numel,
                    rank=rank,
                )

    def make_reducer(self) -> GradReducer:
        return _KernelGradReducer(self)

    def make_room(self) -> Tensor:
        return torch.empty(self.plan.numel, dtype=self.plan.dtype, device=self.devices[0])

    def hand_over(self, total: Tensor) -> Tensor:
        return total


class _KernelGradReducer:
    """Reads gradients where backward has put them: a recording's memory stays where it is."""

    def __init__(self, backend: KernelBackend) -> None:
        self._backend = backend
        missing = [zeros.data_ptr() for zeros in backend.zeros]
        self._sources = GradTables(backend.plan, backend.workers, backend.devices, missing)

    def take(self, grads: Sequence[Grads]) -> list[int]:
        rows = [{i: g for i, g in enumerate(row) if g is not None} for row in grads]
        return [j for j, row in enumerate(rows) if self._sources.take(j, row)]

    def run(self) -> None:
        from everygpu.comm import kernels  # needs Triton, which not every machine has

        backend = self._backend
        for rank, d in enumerate(backend.workers):
            with queueing_on(d):
                kernels.run_add(
                    self._sources.tables[rank],
                    backend.lengths[rank],
                    backend.rooms[rank],
                    dtype=backend.plan.dtype,
                    block=BLOCK_NUMEL,
                    begin=rank * backend.plan.chunk_numel,
                    index=backend.index,
                    rank=backend.first_worker + rank,
                )

    def write_tables(self) -> None:
        self._sources.write()

    def forget(self) -> None:
        self._sources.forget()


class CopyBackend:
    """Copies flat memory, cut into as many chunks as there are devices; adds gradients up by itself.

    Each device adds up and passes on its own, so that all links between GPUs are busy.

    Args:
        originals: Dense.
        plan: How they lie in flat memory.
        flats: That of the twins, one for each device after the first.
        devices: One per replica.
    """

    def __init__(
        self,
        originals: Sequence[Tensor],
        plan: BucketPlan,
        flats: Sequence[Tensor],
        devices: Sequence[torch.device],
    ) -> None:
        home = plan.make_flat(devices[0])
        self._originals = list(originals)
        self._plan = plan
        self._values = [home, *flats]
        self._sums = [torch.zeros_like(flat) for flat in self._values]
        self._grads: Sequence[Grads] = []
        self._arrivals = [torch.zeros_like(flat.chunk(len(devices))[0]) for flat in self._values]

    def send(self) -> None:
        if len(self._values) == 1:
            return
        home, *others = self._values
        fill_views(self._plan.views(home), self._originals)
        for j, (chunk, flat) in enumerate(zip(home.chunk(len(self._values))[1:], others), 1):
            comm.fill(flat.chunk(len(self._values))[j], chunk)
        comm.all_gather(self._values)

    def make_reducer(self) -> GradReducer:
        return self

    def make_room(self) -> Tensor:
        return self._sums[0]

    def hand_over(self, total: Tensor) -> Tensor:
        return total.clone()

    def take(self, grads: Sequence[Grads]) -> list[int]:
        self._grads = grads
        return []

    def run(self) -> None:
        for flat, row in zip(self._sums, self._grads):
            if any(g is None for g in row):
                flat.zero_()
            fill_views(self._plan.views(flat), row)
        # From here on the j-th chunks are device j's.
        columns = list(zip(*(flat.chunk(len(self._sums)) for flat in self._sums)))
        for j, (column, arrival) in enumerate(zip(columns, self._arrivals)):
            for theirs in (*column[:j], *column[j + 1 :]):
                comm.fill(arrival, theirs)
                column[j].add_(arrival)
        for j, (home, *_) in enumerate(columns[1:], 1):
            comm.fill(home, columns[j][j])

    def write_tables(self) -> None:
        """Nothing was left to be done."""

    def forget(self) -> None:
        self._grads = []
