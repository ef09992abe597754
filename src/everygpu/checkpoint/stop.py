"""SIGTERM and SIGUSR1, as of Slurm's preemption and spot machines: the run saves once more, and ends.

A handler notes the first one, which a `CheckpointManager` looks for at its next save. The second one does what it
would do without us, and so does one that no save follows. A handler of the user's stays in place.

Ctrl-C raises KeyboardInterrupt as usual. Pressed twice, it ends the process: a KeyboardInterrupt that comes while the
first one closes workers is lost in a finalizer, and one in a thread's last wait makes it wait again.
"""

import ctypes
import logging
import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any
from weakref import WeakSet, finalize

from everygpu.ranks.group import current_group

logger = logging.getLogger("everygpu")

AGAIN_S = 0.5
"""The same signal within this time is the same request: a launcher passes on what every process of a job gets."""
PRESS_S, TWICE_S = 0.2, 2.0
"""Ctrl-C that comes twice between these times has been pressed twice."""
_ENDS = "%s: the run ends at the next save of its CheckpointManager; a second one ends it now."
_DEFAULTS: dict[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    getattr(signal, "SIGUSR1", signal.SIGTERM): signal.SIG_DFL,  # which Windows lacks
    signal.SIGINT: signal.default_int_handler,
}


class Stop:
    """The handlers of this process, there while a manager is in use, and what they have heard."""

    def __init__(self) -> None:
        self.heard: int | None = None
        self.is_ending = False
        """Whether the last checkpoint is being written: torchrun ends the other ranks as soon as one has ended."""
        self._heard_at = self._pressed_at = -math.inf
        self._users: WeakSet[object] = WeakSet()
        self._pid = os.getpid()
        self._at_exit: Finalize | None = None

    def listen(self, user: object) -> None:
        """Handle signals for a manager; only the main thread can install handlers."""
        if threading.current_thread() is threading.main_thread() and user not in self._users:
            if self._pid != os.getpid():  # forked, with what was the parent's
                self.__init__()  # type: ignore[misc]
            if self._at_exit is None:
                self._at_exit = Finalize(None, self._end, exitpriority=-1)  # after the ranks have met
            finalize(user, self._restore).atexit = False  # before it is added: it is then called after it was taken out
            self._users.add(user)
            for number in filter(_is_free, _DEFAULTS):
                signal.signal(number, self._hear)

    def leave(self, user: object, *, has_failed: bool) -> None:
        """Stop handling signals for a manager; one that came after its last save now acts as it would without us."""
        if self.is_ending and current_group() is not None:
            return
        self._users.discard(user)
        if not self._users and (has_failed or self.is_ending):
            self.heard = None
        self._restore()

    def find_last(self, key: str, num_calls: int) -> int | None:
        """Return which call of save is the last one, asked at each; under ranks it is the one after rank 0's."""
        group = current_group()
        if group is None:
            return None if self.heard is None else num_calls
        # A rank that has heard a signal leaves a note for rank 0, which leaves one for all. Between two calls all ranks
        # exchange gradients, in a step: each finds the note in its next call.
        if group.rank != 0:
            if self.heard is not None:
                group.leave_note(f"{key}: signal", f"{signal.Signals(self.heard).name} on rank {group.rank}")
            note = group.find_note(key)
            return None if note is None else int(note)
        if self.heard is None:
            asked = group.find_note(f"{key}: signal")
            if asked is None:
                return None
            logger.warning(_ENDS, asked)
        group.leave_note(key, str(num_calls + 1))
        return num_calls + 1

    def _restore(self) -> None:
        """Restore the old handlers when the last manager is gone, and pass on a signal that no save has followed."""
        if self._users:
            return
        if threading.current_thread() is not threading.main_thread():
            if self.heard is not None:
                os.kill(os.getpid(), self.heard)  # the main thread hears it
            return
        heard, self.heard = self.heard, None
        for number, default in _DEFAULTS.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, default)
        if heard is not None:
            signal.raise_signal(heard)

    def _end(self) -> None:
        """Pass on, as the interpreter exits, a signal that no save has followed; an error has its own exit code."""
        if not self.is_ending and not hasattr(sys, "last_value") and self._pid == os.getpid():
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            self._users.clear()
            self._restore()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now, is_fork = time.monotonic(), os.getpid() != self._pid  # as a DataLoader's worker is
        is_again = number == self.heard and now - self._heard_at < AGAIN_S
        if number == signal.SIGINT and not is_fork:
            since, self._pressed_at = now - self._pressed_at, now
            if since >= TWICE_S:
                signal.default_int_handler(number, frame)
            if since < PRESS_S:
                return
        elif not is_fork and self._users and (self.is_ending or is_again):
            return
        elif self.heard is None and not is_fork and self._users:
            self.heard, self._heard_at = number, now
            with suppress(RuntimeError):  # the signal has come while this stream was being written
                logger.warning(_ENDS, signal.Signals(number).name)
            return
        elif number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


@cache
def stop() -> Stop:
    """Return the handlers of this process."""
    return Stop()


def _is_free(number: int) -> bool:
    """Whether nobody handles a signal; a function of C code, as faulthandler registers, is hidden from Python."""
    if signal.getsignal(number) is not _DEFAULTS[number]:
        return False
    if number == signal.SIGINT:
        return not hasattr(sys, "ps1")  # a notebook's process is not ours to end
    if sys.platform not in ("linux", "darwin"):
        return True
    answer = ctypes.create_string_buffer(512)
    failed = ctypes.CDLL(None).sigaction(int(number), None, answer)
    # ``struct sigaction`` begins with the function.
    return bool(failed) or not ctypes.cast(answer, ctypes.POINTER(ctypes.c_size_t))[0]
