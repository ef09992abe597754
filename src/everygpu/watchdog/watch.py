"""``everygpu.watch``: a thread that ends its process once an operation or a GPU stands still."""

import atexit
import faulthandler
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from numbers import Real
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeAlias

from everygpu.errors import OptionError
from everygpu.exit_codes import STUCK, tell_reason
from everygpu.progress import SAVING_THREAD, Operation, progress
from everygpu.watchdog.gpus import GpuWatch, find_loss

TIMEOUT_S = 600.0
VARIABLE = "EVERYGPU_WATCHDOG"
"""The timeout in seconds for processes that ``everygpu run`` starts; 0 for none."""
SAVING_S, END_S = 60.0, 90.0
"""A save has this long to be finished, and all together, before the process ends in any case."""
_BACKWARD = {"backward": "tensors", "grad": "outputs"}
"""Functions of ``torch.autograd``, and what they call the tensors that they begin from."""

Stack: TypeAlias = list[tuple[int, CodeType, int]]


def watch(timeout: float = TIMEOUT_S) -> "Watch":
    """End this process when it no longer goes on, and say where it is stuck::

        with everygpu.watch(timeout=300):
            train(x, y)

    Without ``with`` it lasts to the end of the process, as in a script that ``everygpu run`` has started.

    A replica's forward, a backward, an update, a collective over ranks, a recording's launch or a GPU that makes no
    progress for so long is named, with its device; the stacks of all threads are written to standard error. Then a
    checkpoint that is being saved in the background is finished, for up to a minute, and the process ends with exit
    code 6, without running ``finally`` blocks. So does one that has lost a GPU, after an error of the driver that the
    script doesn't catch. ``everygpu run --processes N --max-restarts M`` starts it again.

    Other code of the script may take as long as it likes. Time in which the process is stopped doesn't count; time in
    a debugger does.

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
            f"watch: timeout={timeout!r} is not a number of seconds above 0. Pass e.g. 600, which leaves a first call "
            f"time to compile; to watch no more, call close() on what watch returns."
        )
    return _watchdog().open(float(timeout))


def watch_as_told() -> None:
    """Watch if ``everygpu run`` has started this process, and isn't it."""
    text = os.environ.get(VARIABLE, "0")
    try:
        seconds = float(text)
    except ValueError as cause:
        raise OptionError(f"{VARIABLE}={text!r} is not a number of seconds. Set it to 600.") from cause
    if seconds and not _watchdog().watches:
        watch(seconds)


class Watch(AbstractContextManager["Watch"]):
    """What ``watch`` returns: ends with its ``with`` block, or with the process."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Watch no more, or as before this was made."""
        _watchdog().close(self)

    def __repr__(self) -> str:
        return f"Watch(timeout={self.timeout_s:g})"


class _Watchdog:
    """Looks at this process while watches are open; the newest one's timeout counts."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []
        self._clock_s = 0.0
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._hook: Any = None
        """What ours calls, as long as something may call ours."""
        atexit.register(lambda: self.close(*self.watches))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: self._forget(*self.watches))  # the threads are not in it

    def open(self, timeout_s: float) -> Watch:
        self.watches.append(Watch(timeout_s))
        progress().is_watched = True
        if self._hook is None:  # or one that was set since calls ours
            self._hook, sys.excepthook = sys.excepthook, self._excepthook
        if not self._threads:
            self._is_over = threading.Event()
            gpus = GpuWatch(lambda: self._clock_s, min(1.0, timeout_s / 10), self._is_over)
            looking = threading.Thread(target=self._run, args=(gpus, self._is_over), name="everygpu-watch", daemon=True)
            self._threads = [gpus, looking]
            for thread in self._threads:
                thread.start()
        return self.watches[-1]

    def close(self, *watches: Watch) -> None:
        threads = self._threads
        self._forget(*watches)
        if not self._threads:
            self._is_over.set()
            for thread in threads:  # what they ask of the driver must not come while the interpreter ends
                thread.join(1.0)

    def _forget(self, *watches: Watch) -> None:
        self.watches = [watch for watch in self.watches if watch not in watches]
        if not self.watches:
            self._threads = []
            progress().is_watched = False
            progress().operations.clear()
            if self._hook is not None and sys.excepthook == self._excepthook:
                sys.excepthook, self._hook = self._hook, None

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._hook(kind, error, trace)
        loss = find_loss(error) if self.watches else None
        if loss is not None:
            self.close(*self.watches)
            end_process(loss, with_stacks=False)

    def _run(self, gpus: GpuWatch, is_over: threading.Event) -> None:
        places: dict[int, Place] = {}
        looked_at = time.monotonic()
        while (watches := self.watches) and not is_over.wait(period_s := min(1.0, watches[-1].timeout_s / 10)):
            # A process that was stopped, or held up, has not stood still: what it missed doesn't count.
            now = time.monotonic()
            self._clock_s += min(now - looked_at, 2 * period_s)
            looked_at = now
            places = find_places(places, self._clock_s)
            timeout_s = watches[-1].timeout_s
            late = self._late(places, gpus.pending.copy(), timeout_s)
            if late and self.watches[-1:] == watches[-1:]:
                is_over.set()
                end_process(
                    f"No progress for {timeout_s:g} s: {'; '.join(late)}. If this only takes long, allow more: "
                    f"everygpu.watch(timeout=...), everygpu run --watchdog SECONDS."
                )

    def _late(self, places: "dict[int, Place]", queues: Mapping[int, float], timeout_s: float) -> list[str]:
        """Name what stands still, the first thing that did first, if anything does for too long."""
        found = [(since_s, f"the queue of cuda:{index}") for index, since_s in queues.items()]
        for place in places.values():
            # A rank that waits for others waits longer: the one that is stuck speaks first.
            waits = place.operation is not None and place.operation.waits_for == "ranks"
            found.append((place.since_s + waits * min(0.1 * timeout_s, 10.0), str(place)))
        found.sort()
        if not found or self._clock_s - found[0][0] < timeout_s:
            return []
        return [what for since_s, what in found if self._clock_s - since_s >= timeout_s / 2]


@cache
def _watchdog() -> _Watchdog:
    return _Watchdog()


@dataclass(slots=True, kw_only=True)
class Place:
    """Where a thread is in an operation, or in torch's backward."""

    operation: Operation | None
    root: Any
    """Tells a backward from the next one at the same place: a weak reference to the tensor that it began from."""
    stacks: list[Stack]
    thread: str
    since_s: float

    def __str__(self) -> str:
        return f"{self.operation or 'backward'} in thread {self.thread}"


def find_places(before: Mapping[int, Place], now_s: float) -> dict[int, Place]:
    """Find where threads are in operations, by ident, each with since when it stands there; ``before`` is the last."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {ident: _stack(frame) for ident, frame in frames.items()}
    # A backward's hooks, and the compilation of its kernels, run in threads of torch's engine.
    engines = [stack for ident, stack in stacks.items() if names.get(ident, "Dummy-").startswith("Dummy-")]
    places = {}
    for ident, stack in stacks.items():
        operation = progress().operations.get(ident)
        if operation is not None and all(code is not operation.code for _, code, _ in stack):
            operation = None  # Ctrl-C has left it open
        root = _find_root(frames[ident])
        if (operation or root) is None or (operation is not None and operation.waits_for == "replicas"):
            continue
        own = [stack] if root is None else [stack, *engines]
        name = names.get(ident, "of torch's engine")
        place = Place(operation=operation, root=root, stacks=own, thread=name, since_s=now_s)
        last = before.get(ident)
        if last is not None and last.operation is operation and last.root is root and last.stacks == own:
            place.since_s = last.since_s
        places[ident] = place
    return places


def _stack(frame: FrameType | None) -> Stack:
    stack = []
    while frame is not None:
        stack.append((id(frame), frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return stack


def _find_root(frame: FrameType | None) -> Any:
    """Return a weak reference to what the innermost backward on a stack began from; None outside of one."""
    while frame is not None:
        name = _BACKWARD.get(frame.f_code.co_name)
        if name is not None and frame.f_globals.get("__name__") == "torch.autograd":
            given = frame.f_locals.get(name)
            with suppress(TypeError):  # a GradientEdge
                return weakref.ref(given[0] if isinstance(given, (list, tuple)) and given else given)
        frame = frame.f_back
    return None


def end_process(reason: str, with_stacks: bool = True) -> None:
    """Write why, finish a save, and end this process, by no call that could get stuck as well."""
    timer = threading.Timer(END_S, os._exit, (STUCK,))
    timer.daemon = True
    with suppress(RuntimeError):
        timer.start()
    rank = os.environ.get("RANK")
    place = "" if rank is None else f"rank {rank} (host {socket.gethostname()}, process {os.getpid()}): "
    _write(f"{place}{reason} The process ends with exit code {STUCK}.")
    tell_reason(f"{place}{reason}")
    if with_stacks:
        _write(", ".join(f"thread 0x{t.ident or 0:016x} is {t.name}" for t in threading.enumerate()))
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(2)
    for thread in threading.enumerate():
        if thread.name == SAVING_THREAD:
            _write(f"a checkpoint is being saved, which is finished first, for up to {SAVING_S:g} s.")
            thread.join(SAVING_S)
    distributed = sys.modules.get("torch.distributed")
    if with_stacks and distributed is not None and distributed.is_available() and distributed.is_initialized():
        from everygpu.torch_private.distributed import open_collectives

        for line in open_collectives() or ["none"]:
            _write(f"a collective that is not done: {line}")
    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    os._exit(STUCK)


def _write(text: str) -> None:
    """Write past ``sys.stderr``, whose lock a thread that is stuck may have."""
    with suppress(OSError):
        os.write(2, f"everygpu: {text}\n".encode(errors="replace"))
