"""One pass over a loader: a thread prepares batches, its consumer takes them."""

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from everygpu.checkpoint.dealing import Dealing
from everygpu.errors import FeedTimeoutError, WorkerError
from everygpu.feed.batches import SentBatch, send_batch, unpack_batch
from everygpu.feed.channel import Channel, ChannelClosed
from everygpu.feed.position import Tally
from everygpu.feed.source import Source
from everygpu.feed.waiting import StepTime, WaitMeter
from everygpu.parallel.cuda_graphs.host_rng import DRAW_GATE
from everygpu.parallel.scatter.split import ScatterSpec
from everygpu.ranks.lockstep import Lockstep

GRACE_S = 5.0
"""How long a worker process may take to end when it is asked to."""

logger = logging.getLogger("everygpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedOptions:
    """What all passes of a ``Feeder`` have in common."""

    loader: Any
    route: ScatterSpec
    prefetch: int
    """Batches prepared ahead; 0 for none, and no thread."""
    timeout_s: float | None
    """How long a batch may take to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A batch on its way to the consumer."""

    sent: SentBatch
    loader_state: Any
    load_s: float
    send_s: float


class Feed:
    """One pass over a loader; made by ``iter(feeder)``.

    Args:
        iterator: Of the loader, where the pass begins.
        options: Of the Feeder.
        tally: Is told of each batch that is handed out, and of the end.
        meter: Is told how long each step took.
        dealing: Takes this rank's rows of each batch; None where there is one process.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        options: FeedOptions,
        tally: Tally,
        meter: WaitMeter,
        dealing: Dealing | None = None,
    ) -> None:
        channel: Channel[_Prepared] = Channel(max(1, options.prefetch))
        self._channel = channel
        self._source = Source(iterator, options.loader, lambda: channel.is_closed)
        self._options = options
        self._dealing = dealing
        self._lockstep = None if dealing is None else dealing.lockstep
        self._tally = tally
        self._meter = meter
        self._handed_over_at: float | None = None
        self._end_state: list[Any] = []
        self._has_ended = False
        self._thread: threading.Thread | None = None
        if options.prefetch:
            self._thread = threading.Thread(
                target=_prepare_batches,
                args=(self._source, channel, options.route, dealing, self._end_state),
                name="everygpu-feeder",
                daemon=True,  # in case the loader's next() never returns
            )
        # Also called when the interpreter ends, while threads still run.
        self._finalizer = weakref.finalize(self, _end_pass, self._source, channel, self._thread, os.getpid())
        if self._thread is not None:
            self._thread.start()

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
        self._tally.count(prepared.loader_state)  # last: what interrupts the above has not used the batch
        return batch

    def close(self) -> None:
        """End the thread and the loader's workers; nothing happens the second time."""
        self._finalizer()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self) -> _Prepared:
        if self._thread is None:
            return _prepare(self._source, self._options.route, self._dealing)
        try:
            return self._channel.get(self._thread, self._options.timeout_s)
        except FeedTimeoutError:
            raise FeedTimeoutError(
                f"Feeder: a batch must come within timeout={self._options.timeout_s:g} s, got none. "
                f"{self._source.describe_workers()} Raise timeout, or look at what the loader waits for."
            ) from None

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
        sent = send_batch(lockstep.empty_batch(), self._options.route)
        return _Prepared(sent=sent, loader_state=self._state_at_end(), load_s=0.0, send_s=0.0)

    def _state_at_end(self) -> Any:
        return self._end_state[0] if self._thread is not None else self._source.state()

    def _measure(self, prepared: _Prepared, asked_at: float) -> None:
        now = time.perf_counter()
        if self._handed_over_at is not None:
            times = {"load_s": prepared.load_s, "send_s": prepared.send_s}
            self._meter.add(StepTime(total_s=now - self._handed_over_at, wait_s=now - asked_at, **times))
        self._handed_over_at = now

    def _finish(self, error: BaseException) -> None:
        if isinstance(error, StopIteration):
            self._tally.finish(self._state_at_end())
        elif isinstance(error, (FeedTimeoutError, WorkerError)):
            self._channel.close()
            self._source.kill_workers()
        self.close()


def _prepare(source: Source, route: ScatterSpec, dealing: Dealing | None) -> _Prepared:
    start = time.perf_counter()
    with DRAW_GATE.drawing():
        batch = source.fetch()
    if dealing is not None:
        batch = dealing.take(batch, route.dim)
    loaded = time.perf_counter()
    sent, state = send_batch(batch, route), source.state()
    return _Prepared(sent=sent, loader_state=state, load_s=loaded - start, send_s=time.perf_counter() - loaded)


def _prepare_batches(
    source: Source, channel: Channel[_Prepared], route: ScatterSpec, dealing: Dealing | None, end_state: list[Any]
) -> None:
    """Prepare batches until the loader ends or the channel closes: the thread's target."""
    kill = False
    try:
        while True:
            channel.wait_for_room()
            channel.put(_prepare(source, route, dealing))
    except ChannelClosed:
        pass
    except StopIteration:
        end_state.append(source.state())
        channel.finish()
    except BaseException as error:  # noqa: BLE001 - raised again where the batch is asked for
        kill = isinstance(error, WorkerError)
        channel.finish(error)
    finally:
        source.end(kill=kill)


def _end_pass(source: Source, channel: Channel[_Prepared], thread: threading.Thread | None, pid: int) -> None:
    """End a pass's thread and workers, whatever they are doing; in the thread of the consumer."""
    if pid != os.getpid():  # a fork has copied neither, and the channel's lock as it was: perhaps taken
        return
    channel.close()
    if thread is None or thread.ident is None:  # Ctrl-C came before it was started
        source.end(kill=False)
        return
    if thread is threading.current_thread():  # the last reference was dropped there
        return
    try:
        thread.join(GRACE_S)
    except BaseException:  # a second Ctrl-C asks for an end at once
        source.kill_workers()
        thread.join(GRACE_S)
        raise
    if thread.is_alive():
        source.kill_workers()
        thread.join(GRACE_S)
    if thread.is_alive():
        logger.warning("Feeder: the loader's next() has not returned since the loop was left: its thread goes on.")
