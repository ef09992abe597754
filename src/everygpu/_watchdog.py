"""Ends a run that has stopped making progress, and says where it is stuck.

Nothing here imports torch: ``everygpu run`` watches before a script has loaded it.
"""

import atexit
import ctypes
import faulthandler
import gc
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cache
from numbers import Real
from types import FrameType, TracebackType
from typing import Any

from everygpu.errors import OptionError, ReplicaError
from everygpu.exit_codes import STUCK, report_reason
from everygpu.progress import SAVING_THREAD, progress

TIMEOUT_S = 600.0
VARIABLE = "EVERYGPU_WATCHDOG"
"""The timeout in seconds for processes that ``everygpu run`` starts; 0 for none."""
SAVING_S, END_S = 60.0, 90.0
"""A save has this long to be finished, and all together, before the process ends in any case."""
FATAL_CUDA_ERRORS = frozenset({46, 100, 214, 220, 226, 700, 702, 709, 714, 715, 716, 717, 718, 719, 721, 999})
"""Codes of ``cudaError_t`` after which each call of the process fails: faults of memory, links and kernels, GPUs that
are not there. Not 710, ``cudaErrorAssert``: another try would meet the same index out of range again."""
NOT_READY = 600  # CUDA_ERROR_NOT_READY
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED: the process doesn't use CUDA so far
_CAPTURING = range(900, 909)
"""Codes of what another thread's capture forbids for now."""
_POOLS = (("concurrent.futures.thread", "_worker"), ("multiprocessing.pool", "worker"))
"""Where the standard library's pools run what they are given."""
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


def watchdog(timeout: float = TIMEOUT_S) -> "Watch":
    """End this process when it stops making progress, and say where it is stuck::

        with everygpu.watchdog(timeout=300):
            train(x, y)

    Without ``with`` it watches until the process ends, as ``everygpu run`` does.

    It watches each replica's forward, backward, updates, collectives over ranks, replays of captures and GPUs. If one
    makes no progress for the timeout, it names it with its device and writes the stacks of all threads to standard
    error. Then it finishes a background save, for up to a minute, and ends the process with exit code 6, without
    ``finally`` blocks. It also ends a process that has lost a GPU, after an error of the driver that the script doesn't
    catch. ``everygpu run --processes N --max-restarts M`` restarts it.

    Other code of the script has no time limit. Time in which the process is stopped doesn't count; time in a debugger
    does.

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
            f"watchdog: timeout={timeout!r} is not a number of seconds above 0. Pass e.g. 600, which leaves a first "
            f"call time to compile; to watch no more, call close() on what it returns."
        )
    return _watchdog().open(float(timeout))


def watch_if_requested() -> None:
    """Watch if ``everygpu run`` has started this process, and isn't it."""
    text = os.environ.get(VARIABLE, "0")
    try:
        seconds = float(text)
    except ValueError as cause:
        raise OptionError(f"{VARIABLE}={text!r} is not a number of seconds. Set it to 600.") from cause
    if seconds and not _watchdog().watches:
        watchdog(seconds)


class Watch(AbstractContextManager["Watch"]):
    """What ``watchdog`` returns: ends with its ``with`` block, or with the process."""

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
        loss = explain_lost_gpu(error) if self.watches else None
        if loss is not None:
            self.close(*self.watches)
            end_process(loss, with_stacks=False)

    def _run(self, gpus: "GpuWatch", is_over: threading.Event) -> None:
        before, since_s, looked_at = Threads(), 0.0, time.monotonic()
        while (watches := self.watches) and not is_over.wait(period_s := min(1.0, watches[-1].timeout_s / 10)):
            # The time in which the process was suspended doesn't count as time without progress.
            now = time.monotonic()
            self._clock_s += min(now - looked_at, 2 * period_s)
            looked_at = now
            threads = Threads()
            if not (threads.places and threads.is_unchanged_since(before)):
                since_s = self._clock_s
            before = threads
            timeout_s = watches[-1].timeout_s
            # A rank that waits for others waits longer: the one that is stuck speaks first.
            patience_s = min(0.1 * timeout_s, 10.0) if threads.wait_for_ranks else 0.0
            late = self._late(gpus.pending, threads.places, since_s + patience_s, timeout_s)
            if late and self.watches[-1:] == watches[-1:]:
                is_over.set()
                end_process(
                    f"No progress for {timeout_s:g} s: {'; '.join(late)}. If this only takes long, allow more: "
                    f"everygpu.watchdog(timeout=...), everygpu run --watchdog SECONDS."
                )

    def _late(self, queues: Mapping[int, float], places: list[str], since_s: float, timeout_s: float) -> list[str]:
        """Name what has made no progress for too long; the one that stopped first comes first."""
        found = [(since, [f"the queue of cuda:{index}"]) for index, since in dict(queues).items()]
        found = sorted([*found, (since_s, places)] if places else found)
        if not found or self._clock_s - found[0][0] < timeout_s:
            return []
        return [what for since, names in found if self._clock_s - since >= timeout_s / 2 for what in names]


@cache
def _watchdog() -> _Watchdog:
    return _Watchdog()


class Threads:
    """Where the threads are that are in an operation or in torch's backward: the same as before, nothing has moved."""

    def __init__(self) -> None:
        # Until 3.11.9, Python may collect garbage while it makes the frames of other threads. Where a finalizer lets
        # them run on, the process deadlocks, or reads frames that are gone (CPython's issues 106883, 111363).
        collects = gc.isenabled()
        gc.disable()
        try:
            self._look_at_all()
        finally:
            if collects:
                gc.enable()

    def _look_at_all(self) -> None:
        self.places: list[str] = []
        self.wait_for_ranks = True
        self._state: list[Any] = [progress().num_begun]
        self._roots: list[Any] = []
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        pools = [getattr(sys.modules.get(module), name, None) for module, name in _POOLS]
        codes = {function.__code__ for function in pools if function is not None}
        open_now = progress().operations.copy()
        for ident, frame in sys._current_frames().items():
            operation, name = open_now.get(ident), names.get(ident, "Dummy-")
            stack, is_backward = self._look(frame)
            if not codes.isdisjoint(stack):  # a pool's thread: what it works on, a forward may wait for
                self._state += stack
                if hasattr(time, "pthread_getcpuclockid"):  # of a thread that is there, as long as this has the GIL
                    self._state.append(time.clock_gettime_ns(time.pthread_getcpuclockid(ident)))
            if operation is not None and operation.waits_for == "replicas":
                continue
            if operation is not None or is_backward:
                waits = operation is not None and operation.waits_for == "ranks"
                place = f"{'backward' if operation is None else operation.what} in thread {name}"
                self.places.insert(len(self.places) if waits else 0, place)
                self.wait_for_ranks &= waits
            # A backward's hooks, and the compilation of its kernels, run in threads of torch's engine.
            if operation is not None or is_backward or name.startswith("Dummy-"):
                self._state += stack

    def _look(self, frame: FrameType | None) -> tuple[list[Any], bool]:
        """Return what changes when a thread moves, and whether it is in a backward."""
        stack: list[Any] = []
        is_backward = False
        while frame is not None:
            stack += [id(frame), frame.f_code, frame.f_lasti]
            if frame.f_code.co_name in ("backward", "grad") and frame.f_globals.get("__name__") == "torch.autograd":
                is_backward = True
                stack.append(self._find_root(frame.f_locals))
            frame = frame.f_back
        return stack, is_backward

    def _find_root(self, given: Mapping[str, Any]) -> int:
        """Identify a backward by the tensor that it begins from: the next one may be at the same place."""
        root = given.get("tensors", given.get("outputs"))
        with suppress(TypeError):  # a GradientEdge
            self._roots.append(weakref.ref(root[0] if isinstance(root, (list, tuple)) and root else root))
            return id(self._roots[-1])
        return 0

    def is_unchanged_since(self, before: "Threads") -> bool:
        """Whether no thread has moved since."""
        return self._state == before._state


class GpuWatch(threading.Thread):
    """Queues an event on the default stream of each GPU in use, and another once it is done.

    Calls the driver by ``ctypes``, from a thread of its own: a call may block while a GPU hangs, and torch's hold the
    GIL. Work of other streams is seen once the default stream waits for it.
    """

    def __init__(
        self, clock_s: Callable[[], float], period_s: float, is_over: threading.Event, library: Any = None
    ) -> None:
        super().__init__(name="everygpu-watch-gpus", daemon=True)
        self.pending: dict[int, float] = {}
        """Since when each GPU has not come to its event."""
        self._clock_s, self._period_s, self._library = clock_s, period_s, library
        self._events: dict[int, tuple[ctypes.c_void_p, ctypes.c_void_p]] = {}
        self.is_over = is_over

    def run(self) -> None:
        """Look at the GPUs until it is over, or until a call fails, which the script hears of as well."""
        count = ctypes.c_int()
        try:
            if self._library is None:
                self._library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
            while not self.is_over.wait(self._period_s):
                if self._call("cuDeviceGetCount", ctypes.byref(count), allowed=(_NOT_INITIALIZED,)):
                    continue
                # Or it would spoil the captures of other threads, which torch.cuda.graph makes in the strictest mode.
                self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))
                for device in filter(self._is_used, range(count.value)):
                    self._look(device)
        except (OSError, RuntimeError, AttributeError):
            self.pending.clear()

    def _look(self, device: int) -> None:
        is_pending = device in self.pending
        if not is_pending:
            self.pending[device] = self._clock_s()  # before calls that block while the GPU's queue is full
        context, event = self._event_of(device)
        self._call("cuCtxSetCurrent", context)
        if not is_pending:  # refused by a capture, it is done as before
            self._call("cuEventRecord", event, None, allowed=_CAPTURING)
        if self._call("cuEventQuery", event, allowed=(NOT_READY, *_CAPTURING)) != NOT_READY:
            del self.pending[device]

    def _is_used(self, device: int) -> bool:
        flags, is_active = ctypes.c_uint(), ctypes.c_int()
        self._call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(is_active))
        return bool(is_active.value)

    def _event_of(self, device: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """Return a GPU's context, which is there, and its event."""
        if device not in self._events:
            context, event = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._call("cuCtxSetCurrent", context)
            self._call("cuEventCreate", ctypes.byref(event), _NO_TIMING)
            self._events[device] = context, event
        return self._events[device]

    def _call(self, name: str, *args: Any, allowed: "range | tuple[int, ...]" = ()) -> int:
        code: int = 0 if self.is_over.is_set() else getattr(self._library, name)(*args)
        if code and code not in allowed:
            raise RuntimeError(f"{name} failed with code {code}")
        return code


def explain_lost_gpu(error: BaseException | None) -> str | None:
    """Return a message if an uncaught error means that a GPU is lost; call nothing of CUDA's."""
    torch: Any = sys.modules.get("torch")
    seen: dict[int, BaseException] = {}
    while error is not None and id(error) not in seen:
        seen[id(error)] = error
        error = error.__cause__ or error.__context__
    errors = [e for e in seen.values() if torch is not None and isinstance(e, torch.AcceleratorError)]
    code = next((code for e in errors if (code := getattr(e, "error_code", None)) in FATAL_CUDA_ERRORS), None)
    if code is None:
        return None
    where = next((str(e).partition(" failed")[0] for e in seen.values() if isinstance(e, ReplicaError)), "")
    return (
        f"This process has lost a GPU: CUDA error {code}{where.replace('forward: ', ', in ')}. Start again from the "
        f"newest checkpoint, as everygpu run --max-restarts does. nvidia-smi and `dmesg | grep -i xid` show whether "
        f"the GPU is at fault."
    )


def end_process(reason: str, with_stacks: bool = True) -> None:
    """Write why, finish a save, and end this process, by no call that could get stuck as well."""
    timer = threading.Timer(END_S, os._exit, (STUCK,))
    timer.daemon = True
    with suppress(RuntimeError):
        timer.start()
    rank = os.environ.get("RANK")
    place = "" if rank is None else f"rank {rank} (host {socket.gethostname()}, process {os.getpid()}): "
    _write(f"{place}{reason} The process ends with exit code {STUCK}.")
    report_reason(f"{place}{reason}")
    if with_stacks:
        _write(", ".join(f"thread 0x{t.ident or 0:016x} is {t.name}" for t in threading.enumerate()))
        with suppress(OSError, ValueError):
            if _has_stderr():
                faulthandler.dump_traceback(2)
    for thread in threading.enumerate():
        if thread.name == SAVING_THREAD:
            _write(f"a checkpoint is being saved, which is finished first, for up to {SAVING_S:g} s.")
            thread.join(SAVING_S)
    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    os._exit(STUCK)


def _write(text: str) -> None:
    """Write past ``sys.stderr``, whose lock a thread that is stuck may have."""
    with suppress(OSError):
        if _has_stderr():
            os.write(2, f"everygpu: {text}\n".encode(errors="replace"))


def _has_stderr() -> bool:
    """Whether file 2 is standard error: where that was closed, it may be a file of the script's."""
    return sys.__stderr__ is not None and not sys.__stderr__.closed
