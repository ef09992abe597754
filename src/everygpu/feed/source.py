"""The user's loader, as an iterator that can be stopped, and whose worker processes may die.

Knows the insides of torch's DataLoader. Loaders of other kinds are iterated as they are.
"""

import contextlib
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everygpu.errors import WorkerError
from everygpu.torch_private.data import LoaderIterator, remove_worker_pids

_POLL_S = 0.1
"""How often a DataLoader's iterator looks whether a worker has died, or the loop was left; by itself every 5 s."""

_DEATH_S = 1.0
"""How long a worker may take from closing its connections, which is seen first, to its end."""

_HINTS = {
    "SIGKILL": "The kernel's out-of-memory killer does this: take fewer workers, or smaller items.",
    "SIGBUS": "Shared memory may be full: see `df -h /dev/shm`, or take fewer workers.",
}


class Stopped(Exception):  # noqa: N818 - no error: the loop was left
    """Ends a thread that loads batches."""


class Source:
    """An iterator over a loader's batches, which ends when ``stop`` is set."""

    def __init__(self, iterator: Iterator[Any], loader: Any, stop: threading.Event) -> None:
        self._iterator: Any = iterator
        self._loader = loader
        self._workers: list[Any] = []
        self._has_killed = False
        if isinstance(iterator, LoaderIterator) and hasattr(iterator, "_workers"):
            self._workers = list(iterator._workers)
            _watch(iterator, stop)

    def fetch(self) -> Any:
        """Return the next batch; raise Stopped where the loop was left, a WorkerError where a worker has died."""
        try:
            return next(self._iterator)
        except (RuntimeError, OSError, EOFError) as error:
            if "in DataLoader worker process" in str(error):  # raised by the dataset
                raise
            dead = self._await_dead()
            if not dead:
                raise
            ends = ", ".join(f"pid {w.pid} {_describe_end(w.exitcode)}" for w in dead)
            hint = next((_HINTS[name] for name in _HINTS if name in ends), "Run with num_workers=0 to see its error.")
            raise WorkerError(f"Feeder: a worker process of the loader has died: {ends}. {hint}") from error

    def _await_dead(self) -> list[Any]:
        """List the workers that have died, which may take a moment."""
        deadline = time.monotonic() + _DEATH_S
        while self._workers:
            dead = [w for w in self._workers if not w.is_alive() and w.exitcode]
            if dead or time.monotonic() > deadline:
                return dead
            time.sleep(0.01)
        return []

    def end(self, *, kill: bool) -> None:
        """Let go of the iterator, and see its workers out, in the thread that used it; ``kill`` doesn't ask them."""
        iterator, self._iterator = self._iterator, iter(())
        if not self._workers:
            return
        vars(iterator).pop("_try_get_data", None)
        if kill:
            self.kill_workers()
        if self._has_killed or not iterator._persistent_workers:
            iterator._shutdown_workers()
            self.kill_workers()
            for worker in self._workers:
                _remove_shared_memory(worker.pid)

    def kill_workers(self) -> None:
        """End worker processes that wouldn't end by themselves, as one that is stopped never would."""
        self._has_killed = True
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
        for worker in self._workers:
            worker.join(5)
        if getattr(self._loader, "_iterator", None) is not None:  # of persistent workers: the next pass starts others
            self._loader._iterator = None

    def describe_workers(self) -> str:
        """Name the worker processes, for a message."""
        if not self._workers:
            return "The loader has no worker processes: its own next() has not returned."
        return f"The loader's worker processes: pid {', '.join(str(w.pid) for w in self._workers)}."


def _watch(iterator: Any, stop: threading.Event) -> None:
    """Have a DataLoader's iterator look more often whether it should go on.

    torch also raises the death of a worker in the main thread, out of a signal handler, wherever that thread
    is: from here on it shows where the batch is asked for.
    """
    if iterator._worker_pids_set:
        remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    plain, of = type(iterator)._try_get_data, weakref.ref(iterator)

    def try_get_data(timeout: float = _POLL_S) -> tuple[bool, Any]:
        deadline = time.monotonic() + timeout  # which is the DataLoader's own, where it has one
        while True:
            if stop.is_set():
                raise Stopped
            found: tuple[bool, Any] = plain(of(), _POLL_S)
            if found[0] or time.monotonic() >= deadline:
                return found

    iterator._try_get_data = try_get_data


def _remove_shared_memory(pid: int) -> None:
    """Remove what a process that has ended left in /dev/shm.

    torch gives each piece of shared host memory a name, and takes the name away at once. SIGKILL may come in between.
    Where there is too little room, torch raises an error and leaves the name, with as much as there was room for.
    """
    for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _describe_end(code: int) -> str:
    if code > 0:
        return f"ended with exit status {code}"
    with contextlib.suppress(ValueError):  # not every signal has a name
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
