"""SIGTERM and SIGUSR1, as of Slurm's preemption and spot machines: the run saves once more, and ends.

A handler notes the first one, which the `CheckpointManager` looks for at its next save. The second one does what it
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
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from everygpu.errors import OptionError
from everygpu.exit_codes import STOPPED
from everygpu.ranks.group import Group, joined

logger = logging.getLogger("everygpu")

STOPPING = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Windows has no SIGUSR1."""
AGAIN_S = 0.5
"""The same signal within this time is the same request: a launcher passes on what every process of a job gets."""
PRESS_S, TWICE_S = 0.2, 2.0
"""Ctrl-C that comes twice between these times has been pressed twice."""

_ASKED = "a signal asks the run to end"


class Stop:
    """Hears signals while a manager is in use, and says which call of its save is the last one.

    Under ranks rank 0 decides. In the first call after a signal it leaves a note that the next call is the last one.
    Between the two lies a step, in which all ranks exchange gradients: each finds the note there.
    """

    def __init__(self, name: str, signals: Collection[int] | None) -> None:
        self._signals = _check(signals)
        self._key = f"last save to {name}"
        self._heard: signal.Signals | None = None
        self._heard_at = self._pressed_at = -math.inf
        self._installed: dict[signal.Signals, partial[None]] = {}
        self._pid = os.getpid()
        self.num_calls = 0
        self._last: int | None = None
        self._has_asked = self._is_ending = False

    def listen(self) -> None:
        """Hear signals from now on; only the main thread can set that up."""
        if not self._signals or self._installed or threading.current_thread() is not threading.main_thread():
            return
        hear = weakref.WeakMethod(self._hear)  # a manager that is dropped is not kept
        for number in (*self._signals, signal.SIGINT):
            is_default, before = signal.getsignal(number) is signal.SIG_DFL, _beyond(signal.getsignal(number))
            if number is signal.SIGINT and (before is not signal.default_int_handler or hasattr(sys, "ps1")):
                continue  # a notebook's process is not ours to end
            # What C code has installed, as faulthandler.register, is hidden from Python, and would be lost.
            if before not in (None, signal.SIG_IGN) and not (is_default and _has_function(number)):
                handler = partial(_pass_on, hear, before)
                self._installed[number] = handler
                signal.signal(number, handler)
        weakref.finalize(self, _restore, self._installed).atexit = False

    def leave(self, *, has_failed: bool) -> None:
        """Hear nothing more; a signal that came after the last save acts now as it would without us."""
        missed = None if self._is_ending or has_failed else self._heard
        self._heard = None
        is_alone = joined() is None
        if self._is_ending and not is_alone:  # torchrun ends the others as soon as one has ended
            return
        if threading.current_thread() is threading.main_thread():
            _restore(self._installed)
            if missed is not None and is_alone and signal.getsignal(missed) is signal.SIG_DFL:
                signal.raise_signal(missed)

    def is_here(self) -> bool:
        """Tell at the next call of save whether it is the last one."""
        self.num_calls += 1
        group = joined() if self._signals else None
        if group is None:
            return self._heard is not None
        if self._last is None:
            self._last = self._agree(group)
        is_last = self._last is not None and self.num_calls >= self._last
        # Rank 0 writes, and can be ended meanwhile, which ends all. The others only wait for it.
        self._is_ending = is_last and group.rank != 0
        return is_last

    def end(self, path: Path) -> NoReturn:
        """End the run: its checkpoint is written."""
        self._is_ending = True
        logger.warning("%s is saved: the run ends with exit code %d, as a signal asks.", path, STOPPED)
        raise SystemExit(STOPPED)

    def _agree(self, group: Group) -> int | None:
        """Return the call that is the last one: rank 0 says so where a signal has come to it, or to one that asks."""
        if group.rank == 0:
            if self._heard is None and group.find_note(_ASKED) is None:
                return None
            group.leave_note(self._key, str(self.num_calls + 1))
            return self.num_calls + 1
        note = group.find_note(self._key)
        if note is None and self._heard is not None and not self._has_asked:
            self._has_asked = True
            group.leave_note(_ASKED, "")
        return None if note is None else int(note)

    def _hear(self, number: signal.Signals, frame: FrameType | None, before: Any) -> None:
        before, now, since_press, since_heard = _beyond(before), time.monotonic(), self._pressed_at, self._heard_at
        if number not in self._installed or os.getpid() != self._pid:  # no longer in use; a DataLoader's worker
            _act(number, frame, before)
        elif number is signal.SIGINT:
            self._pressed_at = now
            if now - since_press >= PRESS_S:
                _act(number, frame, signal.SIG_DFL if now - since_press < TWICE_S else before)
        elif self._heard is None:
            self._heard, self._heard_at = number, now
            if callable(before):
                before(number, frame)
            with suppress(RuntimeError):  # the signal has come while this stream was being written
                logger.warning(
                    "%s: the run ends at the next save of its CheckpointManager; a second one ends it now.", number.name
                )
        elif callable(before):
            before(number, frame)
        elif not self._is_ending and (number is not self._heard or now - since_heard >= AGAIN_S):
            _act(number, frame, signal.SIG_DFL)


def _pass_on(hear: Callable[[], Any], before: Any, number: int, frame: FrameType | None) -> None:
    if (heard_by := hear()) is None:
        _act(number, frame, _beyond(before))
    else:
        heard_by(signal.Signals(number), frame, before)


def _restore(handlers: dict[signal.Signals, partial[None]]) -> None:
    """Put back what was there before; a handler below another one stays, and passes on."""
    if threading.current_thread() is threading.main_thread():
        installed = dict(handlers)
        handlers.clear()
        for number, handler in installed.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, _beyond(handler))


def _beyond(handler: Any) -> Any:
    """Return the handler below those of managers that are gone or closed."""
    while isinstance(handler, partial) and handler.func is _pass_on:
        heard_by = handler.args[0]()
        if heard_by is not None and heard_by.__self__._installed:
            break
        handler = handler.args[1]
    return handler


def _act(number: int, frame: FrameType | None, handler: Any) -> None:
    """Do what another handler, or the system, does at a signal."""
    if callable(handler):
        handler(number, frame)
    elif handler is signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _check(signals: Collection[int] | None) -> tuple[signal.Signals, ...]:
    try:
        chosen = STOPPING if signals is None else tuple(map(signal.Signals, signals))
    except (TypeError, ValueError):
        chosen = (signal.SIGINT,)
    if not set(chosen) <= set(STOPPING):
        raise OptionError(
            f"CheckpointManager: signals are some of signal.SIGTERM and signal.SIGUSR1, got {signals!r}. Pass e.g. "
            f"signals=[signal.SIGTERM], or signals=() for none."
        )
    return chosen


def _has_function(number: int) -> bool:
    """Tell whether a function handles a signal, by ``struct sigaction``, which begins with its address."""
    answer = ctypes.create_string_buffer(512)
    if sys.platform not in ("linux", "darwin") or ctypes.CDLL(None).sigaction(int(number), None, answer):
        return False
    return bool(ctypes.cast(answer, ctypes.POINTER(ctypes.c_size_t))[0])
