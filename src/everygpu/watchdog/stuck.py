"""Which threads stay where they are, judged by looking at them again and again.

A thread is looked at while it is in an operation of ours, or in torch's backward; what else a script does is its own
affair. It moves when it enters or leaves an operation, when any of its Python frames is at another instruction, and
when it computes on the CPU.
"""

import contextlib
import sys
import threading
import weakref
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from everygpu.progress import Operation, Progress

DEBUGGERS = frozenset({"bdb", "pdb", "ipdb", "pudb", "pydevd", "IPython.core.debugger"})
PATIENCE, MOST_PATIENCE_S = 0.1, 10.0
"""A rank that waits for others does so for longer, by this share of the timeout: the one that is stuck speaks first."""
BUSY = 0.1
"""A thread that computes on the CPU for this share of the time moves, though it may be in one long call."""
_OUTPUTS = {"backward": "tensors", "grad": "outputs"}
"""What the functions of ``torch.autograd`` call the tensors that they begin from."""


@dataclass(slots=True)
class Place:
    """Where a thread is, as far as it doesn't move."""

    thread: str
    where: str
    """File, line and function of its innermost frame that is not Python's or torch's own, if there is one."""
    operation: Operation | None
    """None in a backward that no operation of ours is around."""
    key: Hashable
    root: Any
    """What tells one backward from the next: a weak reference to the tensor that it began from; True outside of one."""
    since_s: float
    cpu_s: float

    def __str__(self) -> str:
        what = "backward" if self.operation is None else str(self.operation)
        return f"{what}, in thread {self.thread}, {self.where}"

    def patience_s(self, timeout_s: float) -> float:
        """Return how long it may stay there."""
        waits = self.operation is not None and self.operation.waits_for == "ranks"
        return timeout_s + (min(PATIENCE * timeout_s, MOST_PATIENCE_S) if waits else 0.0)


class Judge:
    """Looks at all threads but the one that calls it.

    Args:
        progress: What they are in.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._places: dict[int, Place] = {}
        self._looked_s = 0.0

    def look(self, now_s: float) -> list[Place]:
        """Return where the threads are that may be stuck, each with when it was first seen there.

        Args:
            now_s: On any clock that goes on.
        """
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        if _is_debugged(frames):
            self._places.clear()
            return []
        names = {thread.ident: thread for thread in threading.enumerate()}
        engines = {ident: tuple(_stack(f)) for ident, f in frames.items() if _is_engines(names.get(ident))}
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        found: dict[int, Place] = {}
        for ident, frame in frames.items():
            place = self._place(ident, frame, names.get(ident), frozenset(engines.items()), now_s)
            if place is not None:
                found[ident] = _kept(self._places.get(ident), place, elapsed_s)
        self._places = found
        return list(found.values())

    def _place(
        self, ident: int, frame: FrameType, thread: threading.Thread | None, engines: Hashable, now_s: float
    ) -> Place | None:
        operation = self._progress.operations.get(ident)
        stack = list(_stack(frame))
        if operation is not None and all(code is not operation.code for code, _ in stack):
            operation = None  # an interrupt came before its end could be noted; or it has begun since
        root, backward = _find_backward(frame, None if operation is None else operation.code)
        if backward is None and (operation is None or operation.waits_for == "replicas"):
            return None
        key = (operation, operation and operation.num_inner, backward, tuple(stack), engines if backward else None)
        name = "of torch's engine" if thread is None else thread.name
        return Place(name, describe(frame), operation, key, root, now_s, _cpu_s(thread))


def describe(frame: FrameType) -> str:
    """Say where a thread is, in the script rather than in Python's own modules, if it is there."""
    inner: FrameType | None = frame
    while inner is not None and _is_library(inner):
        inner = inner.f_back
    at = inner or frame
    return f"at {at.f_code.co_filename}, line {at.f_lineno}, in {at.f_code.co_name}"


def _is_library(frame: FrameType) -> bool:
    top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return (top in sys.stdlib_module_names and top != "__main__") or top in ("torch", "everygpu")


def _kept(before: Place | None, now: Place, elapsed_s: float) -> Place:
    """Return the present place with when the thread was first seen there."""
    if before is None or before.key != now.key or not _is_same_backward(before.root, now.root):
        return now
    is_on_gpu = now.operation is not None and getattr(now.operation.device, "type", "cpu") != "cpu"
    if is_on_gpu or now.cpu_s - before.cpu_s < BUSY * elapsed_s:
        now.since_s = before.since_s
    return now


def _is_same_backward(before: Any, now: Any) -> bool:
    if isinstance(before, weakref.ref) and isinstance(now, weakref.ref):
        return before() is not None and before() is now()
    return before is now is True


def _stack(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    while frame is not None:
        yield frame.f_code, frame.f_lasti
        frame = frame.f_back


def _find_backward(frame: FrameType | None, ours: CodeType | None) -> tuple[Any, CodeType | None]:
    """Return what tells a backward of torch's from the next, and its code, unless an operation of ours is in it.

    The tensor that it began from is another one each time; a frame's address is not.
    """
    while frame is not None and frame.f_code is not ours:
        name = _OUTPUTS.get(frame.f_code.co_name)
        if name is not None and frame.f_globals.get("__name__") == "torch.autograd":
            given = frame.f_locals.get(name)
            first = given[0] if isinstance(given, (list, tuple)) and given else given
            with contextlib.suppress(TypeError):
                return weakref.ref(first), frame.f_code
            return None, frame.f_code
        frame = frame.f_back
    return True, None


def _is_engines(thread: threading.Thread | None) -> bool:
    """Tell a thread of torch's engine, which runs the hooks of a backward that another one waits for."""
    return thread is None or isinstance(thread, threading._DummyThread)


def _cpu_s(thread: threading.Thread | None) -> float:
    """Return how long a thread has computed; 0 where that can't be asked."""
    if sys.platform != "linux" or thread is None:
        return 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
    return 0.0


def _is_debugged(frames: Mapping[int, FrameType]) -> bool:
    """Tell whether a person looks at the process by a debugger."""
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    for frame in frames.values():
        inner: FrameType | None = frame
        while inner is not None:
            if inner.f_trace is not None or inner.f_globals.get("__name__") in DEBUGGERS:
                return True
            inner = inner.f_back
    return False
