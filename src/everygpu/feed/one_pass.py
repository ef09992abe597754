"""One pass over a loader: a thread prepares batches, the training loop takes them."""

import logging
import math
import os
import queue
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from everygpu.errors import FeedTimeoutError, WorkerError
from everygpu.feed.batches import SentBatch, send_batch, unpack_batch
from everygpu.feed.dealing import Dealing
from everygpu.feed.order import Order
from everygpu.feed.source import Source, Stopped
from everygpu.feed.waiting import StepTime, WaitMeter
from everygpu.parallel.cuda_graphs.host_rng import DRAW_GATE
from everygpu.parallel.scatter.split import ScatterSpec
from everygpu.ranks.lockstep import Lockstep

GRACE_S = 5.0
"""How long a loader's next() may take to return when the loop is left."""

_POLL_S = 0.2
"""Waiting is cut into pieces of this length: on Windows, Ctrl-C gets through only in between."""

logger = logging.getLogger("everygpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A batch on its way to the loop."""

    sent: SentBatch
    load_s: float = 0.0
    send_s: float = 0.0


class Feed:
    """One pass over a loader; made by ``iter(feeder)``."""

    def __init__(
        self, order: Order, route: ScatterSpec, prefetch: int, timeout_s: float | None, meter: WaitMeter
    ) -> None:
        iterator, self._position, dealing = order.begin()
        self._route, self._timeout_s, self._meter = route, timeout_s, meter
        self._lockstep = None if dealing is None else dealing.lockstep
        self._handed_over_at: float | None = None
        self._has_ended = False
        stop = threading.Event()
        self._ahead = _Ahead(Source(iterator, order.iterated, stop), route, dealing, prefetch, stop)
        # Also called when the interpreter ends, while threads still run.
        self._finalizer = weakref.finalize(self, self._ahead.end)
        if self._ahead.thread is not None:
            self._ahead.thread.start()

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> Any:
        """Return the next batch; the current streams of all devices wait for its copies, the host does not.

        Raises:
            FeedTimeoutError: it has not come within the Feeder's ``timeout``.
            WorkerError: a worker process of the loader died.
            RankError: ranks that have to read the same batches have read different numbers of them.
            Exception: what the loader raised for this batch.
        """
        if not self._finalizer.alive:
            raise StopIteration
        asked_at = time.perf_counter()
        try:
            prepared = self._take() if self._lockstep is None else self._take_in_lockstep(self._lockstep)
            batch = unpack_batch(prepared.sent)
            self._measure(prepared, asked_at)
        except BaseException as error:
            self._finish(error)
            raise
        self._position.count()  # last: what interrupts the above has not used the batch
        return batch

    def close(self) -> None:
        """End the thread and the loader's workers; nothing happens the second time."""
        self._finalizer()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self) -> _Prepared:
        found = self._ahead.prepare() if self._ahead.thread is None else self._ahead.wait(self._timeout_s)
        if isinstance(found, _Prepared):
            return found
        try:
            raise found
        finally:
            del found  # its traceback holds all that its frames refer to

    def _take_in_lockstep(self, lockstep: Lockstep) -> _Prepared:
        """Take the next batch; after the loader's end one without rows, while other ranks go on."""
        prepared = None
        if not self._has_ended:
            try:
                prepared = self._take()
            except StopIteration:
                self._has_ended = True
        if not lockstep.goes_on(prepared is not None):
            raise StopIteration
        if prepared is not None:
            return prepared
        return _Prepared(sent=send_batch(lockstep.empty_batch(), self._route))

    def _measure(self, prepared: _Prepared, asked_at: float) -> None:
        now, before = time.perf_counter(), self._handed_over_at
        if before is not None:
            self._meter.add(StepTime(now - before, now - asked_at, prepared.load_s, prepared.send_s))
        self._handed_over_at = now

    def _finish(self, error: BaseException) -> None:
        if isinstance(error, StopIteration):
            self._position.finish()
        elif isinstance(error, (FeedTimeoutError, WorkerError)):
            self._ahead.stop.set()
            self._ahead.source.kill_workers()
        self.close()


class _Ahead:
    """Prepares batches, in a thread that is some of them ahead, or when asked; doesn't keep its pass."""

    def __init__(
        self, source: Source, route: ScatterSpec, dealing: Dealing | None, prefetch: int, stop: threading.Event
    ) -> None:
        self.source, self.stop, self._route, self._dealing = source, stop, route, dealing
        self._ready: queue.SimpleQueue[_Prepared | BaseException] = queue.SimpleQueue()
        """Batches in order; then what the loader ended with, a StopIteration or an error."""
        self._room, self._pid = threading.Semaphore(prefetch), os.getpid()
        self.thread: threading.Thread | None = None
        if prefetch:  # a daemon, in case the loader's next() never returns
            self.thread = threading.Thread(target=self._run, name="everygpu-feeder", daemon=True)

    def prepare(self) -> _Prepared:
        start = time.perf_counter()
        with DRAW_GATE.drawing():
            batch = self.source.fetch()
        if self._dealing is not None:
            batch = self._dealing.take(batch, self._route.dim)
        loaded = time.perf_counter()
        sent = send_batch(batch, self._route)
        return _Prepared(sent=sent, load_s=loaded - start, send_s=time.perf_counter() - loaded)

    def wait(self, timeout_s: float | None) -> _Prepared | BaseException:
        """Take what the thread has ready."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                found = self._ready.get(timeout=max(0.0, min(_POLL_S, deadline - time.monotonic())))
                self._room.release()
                return found
            except queue.Empty:
                if time.monotonic() >= deadline:
                    raise FeedTimeoutError(
                        f"Feeder: no batch came within timeout={timeout_s:g} s. {self.source.describe_workers()} "
                        f"Raise timeout, or look at what the loader waits for."
                    ) from None
                if self.thread is not None and not self.thread.is_alive() and self._ready.empty():
                    raise WorkerError(
                        "Feeder: a fork has no copy of the thread that loads batches. Begin a pass of its own there."
                    ) from None

    def _run(self) -> None:
        """Prepare batches until the loader ends or the loop is left."""
        kill = False
        try:
            while self._room.acquire() and not self.stop.is_set():
                self._ready.put(self.prepare())
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again where the batch is asked for
            kill = isinstance(error, WorkerError)
            self._ready.put(error)
        finally:
            self.source.end(kill=kill)

    def end(self) -> None:
        """End the thread and the workers, whatever they are doing; in the thread of the loop."""
        if self._pid != os.getpid():  # a fork has copied neither, and locks as they were: perhaps taken
            return
        self.stop.set()
        self._room.release()
        thread = self.thread
        if thread is None or thread.ident is None:  # Ctrl-C came before it was started
            self.source.end(kill=False)
            return
        if thread is threading.current_thread():  # the last reference was dropped there
            return
        try:
            thread.join(GRACE_S)
        except BaseException:  # a second Ctrl-C asks for an end at once
            self.source.kill_workers()
            thread.join(GRACE_S)
            raise
        if thread.is_alive():
            self.source.kill_workers()
            thread.join(GRACE_S)
        if thread.is_alive():
            logger.warning("Feeder: the loader's next() has not returned since the loop was left: its thread goes on.")
        while not self._ready.empty():
            self._ready.get_nowait()
