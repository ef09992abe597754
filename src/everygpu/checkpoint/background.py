"""Save in a separate thread, which an interrupt of the caller can't cut off halfway.

Python raises KeyboardInterrupt in the main thread only, after any call there. So locks, files and renames are the
work of another thread, and what is left in the caller's is made to be cut off anywhere: it waits on a lock, as a
``Thread.join`` that is interrupted takes a live thread for a dead one up to Python 3.12.
"""

import _thread
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from everygpu.checkpoint.format import Files
from everygpu.checkpoint.values import Json, identity
from everygpu.progress import SAVING_THREAD
from everygpu.ranks.group import Group

logger = logging.getLogger("everygpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSnapshot:
    """The state of a run, split into what goes into each file."""

    document: Mapping[str, Json]
    files: Files
    """The run's own tensors, not copies; without memory those that other ranks write."""
    group: Group | None = None
    """The ranks that write it together; None if one process does."""
    key: str = ""
    """The key of the notes that these ranks leave for each other."""


class Background:
    """Runs one task at a time in the background; the thread ends with its task."""

    def __init__(self) -> None:
        self._task: _Task | None = None
        self._turn = threading.Lock()  # where a signal's handler saves in the middle of a save
        self._pid = os.getpid()

    def run(self, work: Callable[[], object]) -> None:
        """Run a task after the previous one, and wait for it; an interrupt is raised once the task is done."""
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
        """Start a task after the previous one, whose error is raised. The error of the new task is also logged."""
        self.wait()
        self._task = _Task(work, self._turn, is_logged=True)
        self._task.start()

    def wait(self) -> None:
        """Wait until the task is done, and raise its error once. If the wait is interrupted, the task continues."""
        if self._pid != os.getpid():  # forked: the thread is in the other process
            self.__init__()  # type: ignore[misc]
        if self._task is not None:
            self._task.wait()
        self.check()

    def check(self) -> None:
        """Raise the task's error once if it has failed by now; don't wait for it."""
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
    """A task that runs once, whose start and end can be awaited again after an interrupt."""

    def __init__(self, work: Callable[[], object], turn: threading.Lock, is_logged: bool = False) -> None:
        self.is_done = self._is_started = False
        self.error: BaseException | None = None
        self._work: Callable[[], object] | None = work
        self._turn, self._is_logged = turn, is_logged
        self._claim, self._running = threading.Lock(), threading.Lock()
        self._running.acquire()

    def start(self) -> None:
        """Start the task, also if an interrupt cut off the first call. Run it here if no thread can start any more."""
        if not self._is_started and not self._start_thread():
            self._run()
        self._is_started = True

    def wait(self) -> None:
        """Wait until the task is done."""
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
            if self._is_logged:
                logger.error("A checkpoint saved in the background failed: %s", error)
        finally:
            self._work = None  # and with it the memory that it read
            self.is_done = True
            self._running.release()


class SnapshotMemory:
    """Host memory for one snapshot, pinned if tensors come from GPUs; reused, as allocating and pinning are slow."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def wait(self) -> None:
        """Wait for all copies from GPUs, also those of a snapshot that was abandoned."""
        if self._memory.is_pinned():
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)

    def release(self) -> None:
        """Free the memory; snapshots in it must not be used any more."""
        # Asked of the driver: an interrupt could come between pinning it and noting so.
        if self._memory.is_pinned():
            self.wait()
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        # Of a snapshot that was interrupted; at the process' end the system gives all back.
        if hasattr(self, "_memory") and not sys.is_finalizing():
            self.release()

    def copy(self, snapshot: StateSnapshot) -> Callable[[], StateSnapshot]:
        """Copy a run's state on the current streams, over the previous snapshot; return what waits for the copies."""
        unique = {identity(t): t for tensors in snapshot.files.values() for t in tensors.values()}
        devices = {t.device for t in unique.values() if t.is_cuda}
        padded_bytes = {key: -(-t.nbytes // 64) * 64 for key, t in unique.items()}
        self._reserve(sum(padded_bytes.values()), is_pinned=bool(devices))
        areas: dict[object, Tensor] = {}
        begin = 0
        # One after the other: a GPU copies the first tensors while the areas of the others are made.
        for key, tensor in unique.items():
            area = self._memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            areas[key] = area.copy_(tensor, non_blocking=True)
            begin += padded_bytes[key]
        files = {file: {name: areas[identity(t)] for name, t in part.items()} for file, part in snapshot.files.items()}
        copied = replace(snapshot, files=files)
        events = [torch.cuda.current_stream(device).record_event() for device in devices]

        def wait() -> StateSnapshot:
            for event in events:
                event.synchronize()
            return copied

        return wait

    def _reserve(self, num_bytes: int, is_pinned: bool) -> None:
        """Map memory of exactly this size, where ``pin_memory`` takes a power of two, and lock it in place for GPUs."""
        if num_bytes > self._memory.numel():
            self.release()
            memory = mmap.mmap(-1, num_bytes)
            with suppress(OSError, AttributeError):  # large pages, where the system has them, are cleared faster
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        if is_pinned and not self._memory.is_pinned():
            place, size = self._memory.data_ptr(), self._memory.numel()
            if int(result := torch.cuda.cudart().cudaHostRegister(place, size, 0)) != 0:  # type: ignore[no-untyped-call]
                logger.warning(
                    "%d bytes can't be pinned (%s): training waits while they are copied from the GPUs.", size, result
                )
