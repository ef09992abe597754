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
from typing import TypeAlias

from everygpu.progress import SAVING_THREAD

logger = logging.getLogger("everygpu")

Check: TypeAlias = Callable[[], None]
"""Called by the work where it can stop; raises `AbandonedError` where the caller no longer waits for it."""

Work: TypeAlias = Callable[[Check], object]


class AbandonedError(Exception):
    """Ends work whose caller was interrupted: the tensors it reads may change now. Never leaves this module."""


class Background:
    """Runs one piece of work at a time beside the caller; a thread ends with its work."""

    def __init__(self) -> None:
        self._begin()

    def start(self, work: Work) -> None:
        """Begin a piece of work, after the one before it, whose error is raised."""
        self.wait()
        task = _Task(lambda check: _log_error(work, check), self._turn)
        self._tasks.append(task)
        task.start()

    def run(self, work: Work) -> None:
        """Do a piece of work, after the one before it, and wait for it; given up if the wait is interrupted."""
        self.wait()
        task = _Task(work, self._turn)
        try:
            self._tasks.append(task)
            task.start()
            task.wait()
        except BaseException:
            # First of all, and without a call: a second interrupt can't come before it.
            task.is_abandoned = True
            task.wait()
            raise
        self.check()

    def wait(self) -> None:
        """Wait until the work is done, and raise its error once; when interrupted, the work goes on."""
        if self._pid != os.getpid():  # forked: the threads are in the other process
            self._begin()
        for task in tuple(self._tasks):
            task.wait()
        self.check()

    def check(self) -> None:
        """Raise what the work has raised by now, once; don't wait for it."""
        while self._tasks and self._tasks[0].is_done:
            task = self._tasks.pop(0)
            # The traceback holds this frame and the task: one that held the error would keep what the work allocated.
            error, task.error = task.error, None
            try:
                if error is not None:
                    raise error
            finally:
                del error

    def _begin(self) -> None:
        # Several only where a signal's handler saves in the middle of a save.
        self._tasks: list[_Task] = []
        self._turn = threading.Lock()
        self._pid = os.getpid()


class _Task:
    """A piece of work, done once, whose start and end can be waited for again after an interrupt."""

    def __init__(self, work: Work, turn: threading.Lock) -> None:
        self.is_done = False
        self.is_abandoned = False
        self.error: BaseException | None = None
        self._work: Work | None = work
        self._turn = turn
        self._claim, self._running = threading.Lock(), threading.Lock()
        self._running.acquire()
        self._is_started = False

    def start(self) -> None:
        """Begin the work; again, where an interrupt cut the first call off.

        At the interpreter's end the work is done here: a thread begun in ``atexit`` would not be waited for, and
        Python 3.12 and later refuse to begin one.
        """
        if self._is_started:
            return
        if not self._start_thread():
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
                    self._work(self._check)
        except AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.error = error
        finally:
            self._work = None  # and with it the memory that it read
            self.is_done = True
            self._running.release()

    def _check(self) -> None:
        if self.is_abandoned:
            raise AbandonedError


def _log_error(work: Work, check: Check) -> None:
    try:
        work(check)
    except BaseException as error:
        logger.error("A checkpoint saved in the background failed: %s", error)
        raise
