"""The user's loader, as an iterator that can be stopped, and whose worker processes are watched.

Knows the insides of torch's DataLoader, and nothing else does. Loaders of other kinds are iterated as they are.
"""

import contextlib
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.utils.data

from everygpu.errors import WorkerError
from everygpu.feed.channel import ChannelClosed
from everygpu.torch_private.data import LoaderIterator, remove_worker_pids

_POLL_S = 0.1
"""How often to look whether a worker has died, or the consumer has left; torch's DataLoader does every 5 s."""

_DEATH_S = 1.0
"""How long a worker may take from closing its connections, which is seen first, to its end."""

_HINTS = {
    "SIGKILL": "The kernel's out-of-memory killer does this: take fewer workers, or smaller items.",
    "SIGBUS": "Shared memory may be full: see `df -h /dev/shm`, or take fewer workers.",
}


class Source:
    """An iterator over batches.

    Args:
        iterator: Of the user's loader.
        loader: Where it comes from.
        is_stopped: Tells that the consumer has closed the channel.
    """

    def __init__(self, iterator: Iterator[Any], loader: Any, is_stopped: Callable[[], bool]) -> None:
        self._iterator: Any = iterator
        self._loader = loader
        is_loaders = isinstance(iterator, LoaderIterator)
        self._workers: list[Any] = list(getattr(iterator, "_workers", ())) if is_loaders else []
        self._has_killed = False
        if self._workers:
            _watch(iterator, is_stopped)

    def fetch(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: there is none.
            ChannelClosed: the consumer has closed the channel.
            WorkerError: a worker process died.
        """
        try:
            return next(self._iterator)
        except (RuntimeError, OSError, EOFError) as error:
            dead = self._find_dead(error)
            if not dead:
                raise
            raise WorkerError(_explain_death(dead)) from error

    def _find_dead(self, error: BaseException) -> list[Any]:
        """List the workers whose death may be behind an error, when it is none of the dataset's."""
        if not self._workers or "in DataLoader worker process" in str(error):
            return []
        deadline = time.monotonic() + _DEATH_S
        while True:
            dead = [w for w in self._workers if not w.is_alive() and w.exitcode]
            if dead or time.monotonic() > deadline:
                return dead
            time.sleep(_POLL_S / 10)

    def state(self) -> Any:
        """Return the loader's own position, where it keeps one."""
        return self._loader.state_dict() if keeps_position(self._loader) else None

    def end(self, *, kill: bool) -> None:
        """Let go of the iterator, and see its workers out; in the thread that used it.

        Args:
            kill: Something went wrong with the workers: don't ask them to end.
        """
        iterator, self._iterator = self._iterator, iter(())
        if self._workers:
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
        """Say how the worker processes are, for a message."""
        if not self._workers:
            return "It has no worker processes: its own next() has not returned."
        states = ", ".join(f"pid {w.pid} ({_process_state(w.pid)})" for w in self._workers)
        return f"Its worker processes: {states}."


def keeps_position(loader: Any) -> bool:
    """Tell whether a loader can save its position, as torchdata's StatefulDataLoader can.

    Accelerate's loaders have the methods, too, but fail unless the loader that they hold has them.
    """
    holders = {id(x): x for x in (loader, getattr(loader, "base_dataloader", loader))}.values()
    methods = [getattr(holder, name, None) for holder in holders for name in ("state_dict", "load_state_dict")]
    return all(map(callable, methods)) and not isinstance(loader, torch.nn.Module)


def _watch(iterator: Any, is_stopped: Callable[[], bool]) -> None:
    """Have a DataLoader's iterator look more often whether it should go on.

    torch also raises the death of a worker in the main thread, out of a signal handler, wherever that thread
    is: from here on it shows where the batch is asked for.
    """
    if iterator._worker_pids_set:
        remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    plain, of = type(iterator)._try_get_data, weakref.ref(iterator)

    def try_get_data(timeout: float = 5.0) -> tuple[bool, Any]:
        deadline = time.monotonic() + timeout
        while True:
            if is_stopped():
                raise ChannelClosed
            left = deadline - time.monotonic()
            found: tuple[bool, Any] = plain(of(), max(0.0, min(_POLL_S, left)))
            if found[0] or left <= _POLL_S:
                return found

    iterator._try_get_data = try_get_data


def _explain_death(dead: list[Any]) -> str:
    ends = ", ".join(f"pid {w.pid}: {_describe_end(w.exitcode)}" for w in dead)
    hint = next((_HINTS[name] for name in _HINTS if name in ends), "Run with num_workers=0 to see its error.")
    return f"Feeder: the loader's worker processes must live until the last batch, got {ends}. {hint}"


def _describe_end(code: int) -> str:
    if code > 0:
        return f"it ended with exit status {code}"
    with contextlib.suppress(ValueError):  # not every signal has a name
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it was ended by signal {-code}"


def _remove_shared_memory(pid: int) -> None:
    """Remove what a process that has ended left in /dev/shm.

    torch gives each piece of shared host memory a name, and takes the name away at once. SIGKILL may come in between.
    Where there is too little room, torch raises an error and leaves the name, with as much as there was room for.
    """
    for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _process_state(pid: int) -> str:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # gone, or no Linux
        return "state unknown"
    return next((line.split("(")[-1].rstrip(")") for line in status.splitlines() if line.startswith("State")), "?")
