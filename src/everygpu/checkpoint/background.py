"""Saving in a thread of its own, which an interrupt of the caller can't cut off in the middle of a step.

Python raises KeyboardInterrupt in the main thread only, after any call there. So locks, files and renames are the
work of another thread, and what is left in the caller's is made to be cut off anywhere: it waits on a lock, as a
``Thread.join`` that is interrupted takes a live thread for a dead one up to Python 3.12.
"""

import _thread
import logging
import os
import threading
from collections.abc import Callable

from everygpu.progress import SAVING_THREAD

logger = logging.getLogger("everygpu")


class Background:
    """Runs one piece of work at a time beside the caller; a thread ends with its work."""

    def __init__(self) -> None:
        self._task: _Task | None = None
        self._turn = threading.Lock()  # where a signal's handler saves in the middle of a save
        self._pid = os.getpid()

    def run(self, work: Callable[[], object]) -> None:
        """Do a piece of work, after the one before it; what interrupts the wait for it is raised when it is done."""
        self.wait()
        task = _Task(work, self._turn)
        interrupt: BaseException | None = None
        while not task.is_done:
            try:
                task.wait()
            except BaseException as error:  # noqa: BLE001 - the tensors that the work reads must not change meanwhile
                interrupt = error
        self._task = task
        try:
            if interrupt is not None:
                raise interrupt
        finally:
            del interrupt
        self.check()

    def start(self, work: Callable[[], object]) -> None:
        """Begin a piece of work, after the one before it, whose error is raised."""
        self.wait()
        self._task = _Task(lambda: _log_error(work), self._turn)
        self._task.start()

    def wait(self) -> None:
        """Wait until the work is done, and raise its error once; when interrupted, the work goes on."""
        if self._pid != os.getpid():  # forked: the thread is in the other process
            self.__init__()  # type: ignore[misc]
        if self._task is not None:
            self._task.wait()
        self.check()

    def check(self) -> None:
        """Raise what the work has raised by now, once; don't wait for it."""
        task = self._task
        if task is not None and task.is_done:
            self._task = None
            # The traceback holds this frame and the task: one that held the error would keep what the work allocated.
            error, task.error = task.error, None
            try:
                if error is not None:
                    raise error
            finally:
                del error


class _Task:
    """A piece of work, done once, whose start and end can be waited for again after an interrupt."""

    def __init__(self, work: Callable[[], object], turn: threading.Lock) -> None:
        self.is_done = self._is_started = False
        self.error: BaseException | None = None
        self._work: Callable[[], object] | None = work
        self._turn = turn
        self._claim, self._running = threading.Lock(), threading.Lock()
        self._running.acquire()

    def start(self) -> None:
        """Begin the work; again, where an interrupt cut the first call off.

        At the interpreter's end the work is done here: a thread begun in ``atexit`` would not be waited for, and
        Python 3.12 and later refuse to begin one.
        """
        if not self._is_started and not self._start_thread():
            self._run()
        self._is_started = True

    def wait(self) -> None:
        """Wait until the work is done."""
        self.start()
        if not self.is_done:
            with self._running:
                pass

    def _start_thread(self) -> bool:
        # No daemon: the interpreter waits for it at its end. Begun by another thread: when ``Thread.start`` is
        # interrupted, the new thread may wait forever for a lock that it left taken.
        thread = threading.Thread(target=self._run, name=SAVING_THREAD, daemon=False)
        starting, is_begun = threading.Lock(), []
        starting.acquire()

        def start() -> None:
            try:
                # Asked here, not by the caller: an interrupted ``is_alive`` takes a live thread for dead, up to 3.12.
                if threading.main_thread().is_alive():
                    thread.start()
                    is_begun.append(True)
            except RuntimeError:  # no more threads, for now or for good
                pass
            finally:
                starting.release()

        try:
            _thread.start_new_thread(start, ())
        except RuntimeError:
            return False
        with starting:
            return bool(is_begun)

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):  # the thread of an interrupted start has it
            return
        try:
            with self._turn:
                if self._work is not None:
                    self._work()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.error = error
        finally:
            self._work = None  # and with it the memory that it read
            self.is_done = True
            self._running.release()


def _log_error(work: Callable[[], object]) -> None:
    try:
        work()
    except BaseException as error:
        logger.error("A checkpoint saved in the background failed: %s", error)
        raise
