"""The thread that watches, and for how long operations may stand still."""

import atexit
import math
import os
import sys
import threading
import time
from functools import cache
from numbers import Real
from types import TracebackType
from typing import Any

from everygpu.errors import OptionError
from everygpu.progress import progress
from everygpu.watchdog.end import end_process
from everygpu.watchdog.gpus import GpuWatch
from everygpu.watchdog.lost import find_loss
from everygpu.watchdog.stuck import Judge, Place

TIMEOUT_S = 600.0
VARIABLE = "EVERYGPU_WATCHDOG"
"""The timeout in seconds for processes that ``everygpu run`` starts; 0 for none."""
LONGEST_PERIOD_S, LOOKS = 1.0, 10
"""It looks once a second, or ten times within a shorter timeout."""
JOIN_S = 1.0


class Watch:
    """What ``watch`` returns: ends with its ``with`` block, or with the process.

    Args:
        timeout_s: Seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Watch no more, or as before this was made."""
        _watchdog().leave(self)

    def __repr__(self) -> str:
        return f"Watch(timeout={self.timeout_s:g})"


def watch(timeout: float = TIMEOUT_S) -> Watch:
    """End this process when it no longer goes on, and say where it is stuck::

        with everygpu.watch(timeout=300):
            train(x, y)

    Without ``with`` it lasts to the end of the process, as in a script that ``everygpu run`` has started.

    A replica's forward, a backward, an update, a collective over ranks, a recording's launch or a GPU that stands still
    for so long is named, with its device; the stacks of all threads are written to standard error. Then a checkpoint
    that is being saved in the background is finished, for up to a minute, and the process ends with exit code 6,
    without running ``finally`` blocks. So does one whose GPU is lost, after an error of the driver that the script
    doesn't catch. ``everygpu run --restarts`` starts it again.

    Other code of the script may take as long as it likes. Time in which the process is stopped, or in a debugger,
    doesn't count. A wait within a first call that compiles does.

    Args:
        timeout: Seconds. A second call changes it.
    Returns:
        What ends watching, by ``with`` or ``close()``.
    Raises:
        OptionError: the timeout is no number of seconds over 0.
    """
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if not is_number or not math.isfinite(timeout) or timeout <= 0:
        raise OptionError(
            f"watch: timeout must be more than 0 seconds, got {timeout!r}. Pass e.g. 600, which leaves a first call "
            f"time to compile; to watch no more, call close() on what watch returns."
        )
    found = Watch(float(timeout))
    _watchdog().join(found)
    return found


def watch_as_told() -> None:
    """Watch if ``everygpu run`` has started this process, and isn't it."""
    text = os.environ.get(VARIABLE, "0")
    try:
        seconds = float(text)
    except ValueError as cause:
        raise OptionError(f"watch: {VARIABLE} must be a number of seconds, got {text!r}. Set it to 600.") from cause
    if seconds and not _watchdog().watches:
        watch(seconds)


class _Watchdog:
    """Watches this process while there are watches; the newest one's timeout counts."""

    def __init__(self) -> None:
        self._begin()
        self._hook: Any = None
        """What ours calls, as long as something may call ours."""
        self._changing = threading.RLock()
        atexit.register(self._stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _begin(self) -> None:
        self.watches: list[Watch] = []
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._gpus: GpuWatch | None = None
        self._clock_s = 0.0

    def join(self, watch: Watch) -> None:
        with self._changing:
            self.watches.append(watch)
            if self._thread is None:
                self._start()

    def leave(self, watch: Watch) -> None:
        with self._changing:
            if watch in self.watches:
                self.watches.remove(watch)
                if not self.watches:
                    self._stop()

    def _start(self) -> None:
        if self._hook is None:  # or one that was set since calls ours
            self._hook, sys.excepthook = sys.excepthook, self._excepthook
        self._thread = threading.Thread(target=self._run, args=(self._is_over,), name="everygpu-watch", daemon=True)
        self._thread.start()
        progress().is_watched = True

    def _stop(self) -> None:
        """End the threads: what they ask of a driver must not come while the interpreter ends."""
        progress().is_watched = False
        self._is_over.set()
        if self._gpus is not None:
            self._gpus.stop()
        for thread in (self._thread, None if self._gpus is None else self._gpus.thread):
            if thread is not None and thread is not threading.current_thread():
                thread.join(JOIN_S)
        self._restore()
        self._begin()

    def _forget(self) -> None:
        """Watch nothing in a forked process, which has none of the threads."""
        self._changing = threading.RLock()
        self._restore()
        self._begin()

    def _restore(self) -> None:
        if self._hook is not None and sys.excepthook == self._excepthook:
            sys.excepthook, self._hook = self._hook, None

    def _timeout_s(self) -> float:
        newest = self.watches[-1:]
        return newest[0].timeout_s if newest else math.inf

    def _period_s(self) -> float:
        return min(LONGEST_PERIOD_S, self._timeout_s() / LOOKS)

    def _run(self, is_over: threading.Event) -> None:
        judge, looked_at = Judge(progress()), time.monotonic()
        num_begun, moved_s = 0, 0.0
        while not is_over.wait(self._period_s()):
            # A process that was stopped, or held up, has not stood still: what it missed doesn't count.
            now = time.monotonic()
            self._clock_s += min(now - looked_at, 2 * self._period_s())
            looked_at = now
            self._look_at_gpus()
            places = judge.look(self._clock_s)
            if progress().num_begun != num_begun:
                num_begun, moved_s = progress().num_begun, self._clock_s
            late = self._late(places, moved_s)
            if late and not is_over.is_set():
                end_process(late, self._timeout_s(), self._gpus)

    def _look_at_gpus(self) -> None:
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        if self._gpus is None and cuda is not None and getattr(cuda, "is_initialized", bool)():
            self._gpus = GpuWatch(lambda: self._clock_s, self._period_s)

    def _late(self, places: list[Place], moved_s: float) -> list[str]:
        """Say what stands still, if it does for too long: the first thing that did comes first."""
        limit_s, now_s = self._timeout_s(), self._clock_s
        pending = {} if self._gpus is None else self._gpus.pending()
        # Where operations still begin, the queues of the GPUs move.
        found = [(max(since_s, moved_s), 0.0, f"cuda:{index}: its queue") for index, since_s in pending.items()]
        found += [(p.since_s, p.patience_s(limit_s) - limit_s, str(p)) for p in places]
        if not any(now_s - since_s >= limit_s + patience_s for since_s, patience_s, _ in found):
            return []
        late = sorted((since_s, text) for since_s, _, text in found if now_s - since_s >= limit_s / 2)
        return [f"{text}, since {_time_of_day(now_s - since_s)}" for since_s, text in late]

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._hook(kind, error, trace)
        loss = find_loss(error) if self.watches else None
        if loss is not None:
            end_process([loss], None, self._gpus)


def _time_of_day(ago_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() - ago_s))


@cache
def _watchdog() -> _Watchdog:
    return _Watchdog()
