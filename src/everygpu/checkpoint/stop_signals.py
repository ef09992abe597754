"""Signals that ask a run to save and end: SIGTERM, as of Slurm's preemption and spot machines, and SIGUSR1.

A handler notes the first one, which a `CheckpointManager` looks for at its next save. The second one does what it
would do without us, so a process that doesn't come to a save can be ended.

Ctrl-C raises KeyboardInterrupt, as ever. Pressed twice, it ends the process: a KeyboardInterrupt that comes while the
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
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

from everygpu.errors import OptionError
from everygpu.ranks.group import joined

logger = logging.getLogger("everygpu")

STOPPING = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Windows has no SIGUSR1."""
AGAIN_S = 0.5
"""The same signal within this time is the same request: a launcher passes on what every process of a job gets."""
PRESS_S, TWICE_S = 0.2, 2.0
"""Ctrl-C that comes twice between these times has been pressed twice."""


class _Installed(NamedTuple):
    """What a handler has replaced."""

    before: Callable[[int, FrameType | None], Any] | int
    address: int | None
    """Of the function that the system calls since."""


class StopSignals:
    """The handlers of this process, which its managers share; there are none while no manager is in use."""

    def __init__(self) -> None:
        self.heard: signal.Signals | None = None
        """The signal that has asked the run to end."""
        self.is_ending = False
        """Whether what it asked for is done, so that others like it change nothing."""
        self._heard_at = self._pressed_at = -math.inf
        self._users: dict[int, tuple[frozenset[signal.Signals], weakref.finalize[[int], object]]] = {}
        self._installed: dict[signal.Signals, _Installed] = {}
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def listen(self, user: object, signals: frozenset[signal.Signals]) -> None:
        """Hear signals until the user leaves or is dropped; only the main thread can set that up."""
        if threading.current_thread() is not threading.main_thread() or id(user) in self._users:
            return
        finalizer = weakref.finalize(user, self._drop, id(user))
        finalizer.atexit = False
        self._users[id(user)] = (signals, finalizer)
        for number in {*signals, signal.SIGINT}:
            # Another one, set later than ours, may call ours, which would call it.
            if number not in self._installed or signal.getsignal(number) is signal.SIG_DFL:
                self._install(number)

    def leave(self, user: object) -> signal.Signals | None:
        """Hear nothing more for a user; return the signal that has come too late for a save of the last one."""
        missed = None if self.is_ending else self.heard
        if id(user) in self._users:
            self._users[id(user)][1]()
        return None if self._users else missed

    def _drop(self, key: int) -> None:
        if self.is_ending and joined() is not None:  # torchrun ends the others as soon as one has ended
            return
        self._users.pop(key, None)
        if not self._users:
            self.heard, self.is_ending = None, False
        # Elsewhere than in the main thread, as in a collection of garbage, they stay, and pass signals on.
        if threading.current_thread() is threading.main_thread():
            for number in self._installed.keys() - self._wanted():
                self._restore(number)

    def _wanted(self) -> set[signal.Signals]:
        return {number for signals, _ in self._users.values() for number in {*signals, signal.SIGINT}}

    def _handler_of(self, number: signal.Signals) -> Callable[[int, FrameType | None], None]:
        return self._interrupt if number is signal.SIGINT else self._hear

    def _install(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if number is signal.SIGINT and (before is not signal.default_int_handler or hasattr(sys, "ps1")):
            return  # a notebook's process is not ours to end
        # What C code has installed, as faulthandler.register, is hidden from Python, and would be lost.
        if before is None or before is signal.SIG_IGN or (before is signal.SIG_DFL and _address(number)):
            return
        signal.signal(number, self._handler_of(number))
        self._installed[number] = _Installed(before, _address(number))

    def _restore(self, number: signal.Signals) -> None:
        """Put the handler of before back, unless another one has replaced ours."""
        before, address = self._installed[number]
        if signal.getsignal(number) == self._handler_of(number) and _address(number) == address:
            signal.signal(number, before)
            del self._installed[number]

    def _forget(self) -> None:
        """Have a forked process, as a DataLoader's worker, end as before."""
        for number in tuple(self._installed):
            self._restore(number)
        for _, finalizer in self._users.values():
            finalizer.detach()
        self._users.clear()
        self.heard, self.is_ending = None, False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        asked = signal.Signals(number)
        before = self._installed[asked].before
        if callable(before):
            before(number, frame)
        is_first, now = self.heard is None, time.monotonic()
        if self.is_ending or (asked is self.heard and now - self._heard_at < AGAIN_S):
            return
        if asked in self._wanted() and is_first:
            self.heard, self._heard_at = asked, now
            with suppress(RuntimeError):  # the signal has come while this stream was being written
                logger.warning(
                    "%s: the run ends at the next save of its CheckpointManager; a second one ends it now.", asked.name
                )
        elif not callable(before):
            signal.signal(asked, signal.SIG_DFL)
            signal.raise_signal(asked)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        since, self._pressed_at = time.monotonic() - self._pressed_at, time.monotonic()
        if since < PRESS_S:
            return
        if since < TWICE_S and self._users:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        signal.default_int_handler(number, frame)

    @staticmethod
    def act(number: signal.Signals) -> None:
        """Have a signal do what it does now, where it wasn't passed on to a handler when it came."""
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.raise_signal(number)


def check_signals(signals: Collection[int] | None) -> frozenset[signal.Signals]:
    """Return the signals that a manager is to listen to.

    Raises:
        OptionError: others than SIGTERM and SIGUSR1.
    """
    try:
        chosen = frozenset(STOPPING if signals is None else map(signal.Signals, signals))
    except (TypeError, ValueError):
        chosen = None
    if chosen is None or not chosen <= set(STOPPING):
        raise OptionError(
            f"CheckpointManager: signals must be some of signal.SIGTERM and signal.SIGUSR1, got {signals!r}. Pass e.g. "
            f"signals=[signal.SIGTERM], or signals=() for none."
        )
    return chosen


def _address(number: int) -> int | None:
    """Return the address of the function that handles a signal, 0 for the default; None where that can't be asked."""
    if sys.platform not in ("linux", "darwin"):
        return None
    answer = ctypes.create_string_buffer(512)  # more than any struct sigaction, which begins with the address
    if ctypes.CDLL(None).sigaction(int(number), None, answer):
        return None
    return int(ctypes.cast(answer, ctypes.POINTER(ctypes.c_size_t))[0])


@cache
def stop_signals() -> StopSignals:
    """Return those of this process."""
    return StopSignals()
