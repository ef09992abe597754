"""One pass over a loader: a thread prepares batches and sends their rows, the training loop takes them.

Knows the insides of torch's DataLoader, whose worker processes may die. Other loaders are iterated as they are.
"""

import logging
import math
import multiprocessing
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from everygpu import child, comm, tree
from everygpu.comm.upload import mark, receive, upload
from everygpu.errors import FeedTimeoutError, WorkerError
from everygpu.feed.order import ResumableOrder
from everygpu.feed.rank_rows import RankRows, is_data_loader
from everygpu.parallel.cuda_graphs.host_rng import DRAW_GATE
from everygpu.parallel.scatter.batch_types import ROWS, batch_type, move_tree, open_batch, open_known, spans
from everygpu.parallel.scatter.row_count import plan_batch, shares_of
from everygpu.parallel.scatter.scatter import cut_rows
from everygpu.parallel.scatter.split import Replicated, ScatterSpec
from everygpu.parallel.sharded.batch import ShardedBatch, shard_batch
from everygpu.ranks.lockstep import Lockstep
from everygpu.torch_private.core import LoaderIterator, remove_worker_pids


class SentBatch:
    """Queues the copies of every tensor in a batch: any nesting of containers, tensors of shape (..., rows, ...)."""

    def __init__(self, batch: Any, route: ScatterSpec) -> None:
        self._route = route
        self._plan = plan_batch([("batch", batch)], route)
        # Containers of our own: a loader may change its list or dict for the next batch before this one is unpacked.
        self._structure = tree.map_leaves(lambda leaf: leaf, batch, open_batch)
        self._copies: list[Tensor] = []
        with torch.no_grad():
            self._makes = [self._send(leaf) for _, leaf in tree.leaves(self._structure, "batch", open_batch)]
        self._marks = mark(route.devices)

    def unpack(self) -> Any:
        """Put the batch together for the consumer's thread, whose current streams wait for the copies."""
        receive(self._copies, self._marks)
        makes = iter(self._makes)
        return tree.map_leaves(lambda _: next(makes)(), self._structure, open_batch)

    def _send(self, leaf: Any) -> Callable[[], Any]:
        """Return what makes the value that the consumer gets of a leaf, once its copies have come."""
        home = self._route.devices[0]
        if isinstance(leaf, Replicated):
            return self._send_replicated(leaf)
        known = batch_type(leaf)
        if known is ROWS:
            return self._send_items(leaf)
        if known is not None or (isinstance(leaf, Tensor) and leaf.layout is not torch.strided):
            return lambda: move_tree(leaf, home)
        if isinstance(leaf, ShardedBatch) or not isinstance(leaf, Tensor):
            return lambda: leaf
        if (shares := shares_of(leaf, self._plan, self._route)) is not None:
            return self._send_rows(leaf, *zip(*shares))
        if comm.as_plain(leaf) is not leaf:
            return lambda: move_tree(leaf, home)
        whole = self._note(upload(leaf, home))
        return lambda: _like(whole, leaf)

    def _send_rows(self, x: Tensor, sizes: Sequence[int], devices: Sequence[torch.device]) -> Callable[[], Any]:
        home, dim = self._route.devices[0], self._route.dim
        rows = cut_rows(comm.as_plain(x).detach(), sizes, dim)
        # .data, for a version counter of its own: on CPU replicas this is the loader's memory, not a copy.
        parts = [self._note(upload(part, d).data) for part, d in zip(rows, devices)]
        return lambda: _like(shard_batch(parts, home, dim), x)

    def _send_items(self, items: Any) -> Callable[[], Any]:
        """Send what is in a list of rows to the devices of their replicas."""
        rows: Sequence[int] = [len(items)] if self._plan is None else self._plan.rows
        places = [device for device, part in zip(self._route.devices, spans(rows)) for _ in items[part]]

        def send(leaf: Any, device: torch.device) -> Any:
            return _like(self._note(upload(leaf.detach(), device)), leaf) if _is_plain(leaf) else leaf

        sent = [tree.map_leaves(lambda x, d=d: send(x, d), item, open_known) for item, d in zip(items, places)]  # type: ignore[misc]
        # What else there is moves on the consumer's streams.
        return lambda: type(items)(move_tree(item, device) for item, device in zip(sent, places))

    def _send_replicated(self, marked: Replicated) -> Callable[[], Any]:
        def send(leaf: Any, device: torch.device, *, own: bool) -> Any:
            if not _is_plain(leaf):
                return move_tree(leaf, device)
            leaf = comm.as_plain(leaf)
            moved = upload(leaf.detach() if leaf.requires_grad else leaf, device)
            # Replicas on one device must not share memory: one may write into it.
            return self._note(moved.clone() if own and moved.device == leaf.device else moved)

        copies = [
            tree.map_leaves(lambda x, i=i, d=d: send(x, d, own=i > 0), marked.value, open_known)  # type: ignore[misc]
            for i, d in enumerate(self._route.devices)
        ]
        return lambda: copies[0] if len(copies) == 1 else Replicated(copies[0], copies=copies)

    def _note(self, copied: Tensor) -> Tensor:
        self._copies.append(copied)
        return copied


def _is_plain(leaf: Any) -> bool:
    """Whether a value is a tensor that can be sent ahead, on a stream of its own."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def _like(x: Tensor, original: Tensor) -> Tensor:
    return x.requires_grad_() if original.requires_grad and not x.requires_grad else x


GRACE_S = 5.0
"""How long a loader's next() may take to return when the loop is left."""
_POLL_S = 0.1
"""Waiting is cut into pieces of this length: between them Ctrl-C on Windows, dead workers and a loop's end are seen."""
_DEATH_S = 1.0
"""How long a worker may take from closing its connections, which is seen first, to its end."""
_IN_WORKER = "in DataLoader worker process"
_MAIN = (
    "Workers that are started by spawn or forkserver run the script again: put what it does under `if __name__ == "
    "'__main__':`. num_workers=0 shows other errors."
)
WARN_AFTER_STEPS, LIMIT_PCT = 100, 10.0
"""Waiting for more than this share of so many steps is worth a line in the log."""

logger = logging.getLogger("everygpu")


class Stopped(Exception):  # noqa: N818 - no error: the loop was left
    """Ends a thread that loads batches."""


@dataclass(slots=True)
class FeedReport:
    """How long the steps of a Feeder took, on the host's clock."""

    num_steps: int = 0
    """Steps that were measured: the first batch of each epoch, for which workers start, is not."""
    step_s: float = 0.0
    """From one batch to the next, in the mean."""
    wait_s: float = 0.0
    """The part of a step in which the loop waited for data."""

    @property
    def wait_pct(self) -> float:
        """Share of the time in which the loop waited: 0 to 100; 0 before the first step."""
        return 100 * self.wait_s / self.step_s if self.step_s else 0.0

    def add(self, step_s: float, wait_s: float, warns: bool) -> None:
        """Count a step; warn once, of its first steps, when data is what the devices wait for."""
        self.num_steps += 1
        self.step_s += (step_s - self.step_s) / self.num_steps
        self.wait_s += (wait_s - self.wait_s) / self.num_steps
        if warns and self.num_steps == WARN_AFTER_STEPS and self.wait_pct > LIMIT_PCT:
            logger.warning(
                "Feeder: waited for data during %.0f%% of the first %d steps (%.1f of %.1f ms a step). "
                "everygpu.tune_workers(loader) measures which num_workers is best.",
                *(self.wait_pct, self.num_steps, 1e3 * self.wait_s, 1e3 * self.step_s),
            )


class FeederIterator:
    """One pass over a loader; made by ``iter(feeder)``."""

    def __init__(
        self, order: ResumableOrder, route: ScatterSpec, prefetch: int, timeout_s: float | None, report: FeedReport
    ) -> None:
        workers = _guard_workers(order.iterated, timeout_s)
        try:
            iterator, self._position, rank_rows = order.begin()
        except (RuntimeError, OSError, EOFError) as error:
            _raise_death(error, workers, order.iterated)
        self._route, self._timeout_s, self._report = route, timeout_s, report
        self._lockstep = None if rank_rows is None else rank_rows.lockstep
        self._handed_over_at: float | None = None
        self._has_ended = False
        self._ahead = _Prefetcher(iterator, order.iterated, route, rank_rows, prefetch)
        # Also called when the interpreter ends, while threads still run.
        self._finalizer = weakref.finalize(self, self._ahead.end)
        if self._ahead.thread is not None:
            self._ahead.thread.start()

    def __iter__(self) -> "FeederIterator":
        return self

    def __next__(self) -> Any:
        """Return the next batch; the current streams of all devices wait for its copies, the host does not."""
        if not self._finalizer.alive:
            raise StopIteration
        asked_at = time.perf_counter()
        try:
            sent = self._take() if self._lockstep is None else self._take_in_lockstep(self._lockstep)
            batch = sent.unpack()
            now, before = time.perf_counter(), self._handed_over_at
            if before is not None:
                self._report.add(now - before, now - asked_at, warns=self._ahead.thread is not None)
            self._handed_over_at = now
        except BaseException as error:
            if isinstance(error, StopIteration):
                self._position.finish()
            elif isinstance(error, (FeedTimeoutError, WorkerError)):
                self._ahead.stop.set()
                self._ahead.kill_workers()
            self.close()
            raise
        self._position.count()  # last: what interrupts the above has not used the batch
        return batch

    def close(self) -> None:
        """End the thread and the loader's workers; nothing happens the second time."""
        self._finalizer()

    def __enter__(self) -> "FeederIterator":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self) -> SentBatch:
        found = self._ahead.prepare() if self._ahead.thread is None else self._ahead.wait(self._timeout_s)
        if isinstance(found, SentBatch):
            return found
        try:
            raise found
        finally:
            del found  # its traceback holds all that its frames refer to

    def _take_in_lockstep(self, lockstep: Lockstep) -> SentBatch:
        """Return the next batch; after the loader's end one without rows, while other ranks continue."""
        prepared = None
        if not self._has_ended:
            try:
                prepared = self._take()
            except StopIteration:
                self._has_ended = True
        if not lockstep.goes_on(prepared is not None):
            raise StopIteration
        return prepared or SentBatch(lockstep.empty_batch(), self._route)


class _Prefetcher:
    """Prepares batches, in a thread that is some of them ahead, or when asked; doesn't keep its pass."""

    def __init__(
        self, iterator: Iterator[Any], loader: Any, route: ScatterSpec, rank_rows: RankRows | None, prefetch: int
    ) -> None:
        self.stop = threading.Event()
        self._iterator: Any = iterator
        self._loader, self._route, self._rank_rows = loader, route, rank_rows
        self._workers: list[Any] = []
        if isinstance(iterator, LoaderIterator) and hasattr(iterator, "_workers"):
            self._workers = list(iterator._workers)
            _watch(iterator, self._look)
        self.kill_workers = partial(_kill, self._workers, loader)
        self._ready: queue.SimpleQueue[SentBatch | BaseException] = queue.SimpleQueue()
        """Batches in order; then what the loader ended with, a StopIteration or an error."""
        self._free, self._pid = threading.Semaphore(prefetch), os.getpid()
        self.thread: threading.Thread | None = None
        if prefetch:  # a daemon, in case the loader's next() never returns
            self.thread = threading.Thread(target=self._run, name="everygpu-feeder", daemon=True)

    def prepare(self) -> SentBatch:
        """Load a batch and send it."""
        with DRAW_GATE.drawing():
            batch = self._fetch()
        if self._rank_rows is not None:
            batch = self._rank_rows.take(batch, self._route.dim)
        return SentBatch(batch, self._route)

    def wait(self, timeout_s: float | None) -> SentBatch | BaseException:
        """Take what the thread has ready."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                found = self._ready.get(timeout=max(0.0, min(_POLL_S, deadline - time.monotonic())))
                self._free.release()
                return found
            except queue.Empty:
                if timeout_s is not None and time.monotonic() >= deadline:
                    raise _too_late(timeout_s, self._workers) from None
                if self.thread is not None and not self.thread.is_alive() and self._ready.empty():
                    raise WorkerError(
                        "Feeder: a fork has no copy of the thread that loads batches. Begin an epoch of its own there."
                    ) from None

    def end(self) -> None:
        """End the thread and the workers, whatever they are doing; in the thread of the loop."""
        if self._pid != os.getpid():  # a fork has copied neither, and locks as they were: perhaps taken
            return
        self.stop.set()
        self._free.release()
        thread = self.thread
        if thread is None or thread.ident is None:  # Ctrl-C came before it was started
            self._let_go()
            return
        if thread is threading.current_thread():  # the last reference was dropped there
            return
        try:
            thread.join(GRACE_S)
        except BaseException:  # a second Ctrl-C asks for an end at once
            self.kill_workers()
            thread.join(GRACE_S)
            raise
        if thread.is_alive():
            self.kill_workers()
            thread.join(GRACE_S)
        if thread.is_alive():
            logger.warning(
                "Feeder: the loader's next() has not returned since the loop was left: its thread keeps running."
            )
        while not self._ready.empty():
            self._ready.get_nowait()

    def _run(self) -> None:
        """Prepare batches until the loader ends or the loop is left."""
        try:
            while self._free.acquire() and not self.stop.is_set():
                self._ready.put(self.prepare())
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again where the batch is asked for
            self._ready.put(error)
        finally:
            self._let_go()

    def _fetch(self) -> Any:
        """Return the loader's next batch; raise Stopped where the loop was left, a WorkerError if a worker has died."""
        try:
            return next(self._iterator)
        except (RuntimeError, OSError, EOFError) as error:
            _raise_death(error, self._workers, self._loader)

    def _look(self) -> None:
        if self.stop.is_set():
            raise Stopped

    def _let_go(self) -> None:
        """Let go of the iterator, and see its workers out, in the thread that used it."""
        iterator, self._iterator = self._iterator, iter(())
        if not self._workers:
            return
        vars(iterator).pop("_try_get_data", None)
        if not iterator._persistent_workers or not all(worker.is_alive() for worker in self._workers):
            iterator._shutdown_workers()
            self.kill_workers()


def _guard_workers(loader: Any, timeout_s: float | None) -> Sequence[Any]:
    """Make a copy of a DataLoader fork workers so that none gets stuck; return persistent ones, if none has died."""
    if not (is_data_loader(loader) and loader.num_workers):
        return ()
    loader.multiprocessing_context = child.guard_forks(loader.multiprocessing_context or multiprocessing.get_context())
    workers: Sequence[Any] = getattr(loader._iterator, "_workers", ())
    if dead := [worker for worker in workers if not worker.is_alive()]:
        loader._iterator = None  # the next epoch starts others
        raise _death_of(dead, loader)
    if workers and timeout_s is not None:  # torch waits for them as the epoch begins
        deadline = time.monotonic() + timeout_s

        def look() -> None:
            if time.monotonic() >= deadline:
                _kill(workers, loader)
                raise _too_late(timeout_s, workers)

        _watch(loader._iterator, look)
    return workers


def _kill(workers: Sequence[Any], loader: Any) -> None:
    """End worker processes that wouldn't end by themselves, as one that is stopped never would."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join(5)
    if getattr(loader, "_iterator", None) is not None:  # of persistent workers: the next epoch starts others
        loader._iterator = None


def _too_late(timeout_s: float, workers: Sequence[Any]) -> FeedTimeoutError:
    pids = ", ".join(str(worker.pid) for worker in workers)
    has = f"worker processes: pid {pids}" if pids else "no worker processes"
    what = f"no batch came within timeout={timeout_s:g} s. The loader has {has}"
    return FeedTimeoutError(f"Feeder: {what}. Raise timeout, or look at what the loader waits for.")


def _raise_death(error: Exception, workers: Sequence[Any], loader: Any) -> NoReturn:
    """Raise a WorkerError where the death of a worker is behind an error, else the error that is being handled."""
    if _IN_WORKER in str(error) or isinstance(error, FeedTimeoutError):  # raised by the dataset, or by us
        raise
    deadline = time.monotonic() + _DEATH_S
    while workers and time.monotonic() < deadline:
        if dead := [worker for worker in workers if not worker.is_alive() and worker.exitcode]:
            death = _death_of(dead, loader)
            _kill(workers, loader)
            raise death from error
        time.sleep(0.01)
    if not workers and is_data_loader(loader) and loader.num_workers and isinstance(error, (BrokenPipeError, EOFError)):
        raise WorkerError(f"Feeder: a worker process has ended at its start. {_MAIN}") from error
    raise


def _death_of(dead: Sequence[Any], loader: Any) -> WorkerError:
    if any(getattr(worker, "is_stuck", False) for worker in dead):
        what = f"a worker process hasn't come out of its fork in {len(child.STARTS_S)} tries"
        return WorkerError(f'Feeder: {what}. Pass multiprocessing_context="forkserver", or num_workers=0.')
    ends = ", ".join(f"pid {worker.pid} with exit code {worker.exitcode}" for worker in dead)
    method = (loader.multiprocessing_context or multiprocessing.get_context()).get_start_method()
    if method != "fork" and all(worker.exitcode == 1 for worker in dead):
        return WorkerError(f"Feeder: a worker process of the loader has died: {ends}. {_MAIN}")
    return WorkerError(
        f"Feeder: a worker process of the loader has died: {ends}. -9 is the kernel's out-of-memory killer: take fewer "
        f"workers, or smaller items. -7 is a full /dev/shm. Else num_workers=0 shows the error."
    )


def _watch(iterator: Any, look: Callable[[], object]) -> None:
    """Make a DataLoader's iterator check more often whether to continue."""
    if iterator._worker_pids_set:  # or torch raised the death of a worker in the main thread, wherever that is
        remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    plain, of = type(iterator)._try_get_data, weakref.ref(iterator)

    def try_get_data(timeout: float = _POLL_S) -> tuple[bool, Any]:
        deadline = time.monotonic() + timeout  # which is the DataLoader's own, where it has one
        while True:
            look()
            found: tuple[bool, Any] = plain(of(), _POLL_S)
            if found[0] or time.monotonic() >= deadline:
                return found

    iterator._try_get_data = try_get_data
