"""One capture at a time in a process, and streams of its own for each model."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CaptureLock:
    """Lets one thread at a time record.

    Non-blocking: a thread that fails to acquire it runs its step eagerly and retries at the next one. A recording needs
    autograd's threads, of which each GPU has one for all models, and locks of models that it uses: one of these
    threads, or a thread with such a lock, would wait forever for the recording's end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[Callable[[], None]] = []

    @contextmanager
    def taken(self) -> Iterator[bool]:
        """Hold the lock within; False where another thread holds it, or this one already."""
        if not self._lock.acquire(blocking=False):
            yield False
            return
        try:
            yield True
        finally:
            self._lock.release()
            self._catch_up_if_free()

    def run_between(self, function: Callable[[], None]) -> None:
        """Call a function that waits for all of a GPU's streams, which CUDA forbids while one of them is captured.

        Args:
            function: Called at once, or, while a thread holds the lock, by that thread later.
        """
        self._pending.append(function)
        self._catch_up_if_free()

    def catch_up(self) -> None:
        """Call what is pending; for the thread that holds the lock, while it captures nothing."""
        while self._pending:
            self._pending.pop()()

    def _catch_up_if_free(self) -> None:
        # Looked at again after each release: what came in between found the lock taken.
        while self._pending and self._lock.acquire(blocking=False):
            try:
                self.catch_up()
            finally:
                self._lock.release()


class StreamPool:
    """Stream indices that owners lease for as long as they live, each its own where there are enough.

    Args:
        num: How many there are.
    """

    def __init__(self, num: int) -> None:
        self._choosing = threading.RLock()
        self._owners: list[weakref.WeakSet[object]] = [weakref.WeakSet() for _ in range(num)]

    def take(self, owner: object) -> int:
        """Return the least-used stream index, the lowest of these."""
        with self._choosing:
            sizes = list(map(len, self._owners))
            index = sizes.index(min(sizes))
            self._owners[index].add(owner)
            return index


RECORDING = "recording"
"""Names the stream of each GPU for recordings whose work never runs eagerly."""

NUM_STREAMS = 8
"""How many models have streams of their own at a time; torch has 32 for each GPU, for all purposes."""

CAPTURE_LOCK = CaptureLock()
"""Of the process, as CUDA's rules on capturing are."""

_STREAM_POOL = StreamPool(NUM_STREAMS)


def lease_streams(owner: object) -> str:
    """Name the stream of each GPU on which an owner's work is recorded that may also run eagerly.

    Autograd runs nodes where they were recorded, at any time. On a stream that another thread records on meanwhile,
    that would become part of the recording.

    Args:
        owner: Has them to itself until it is gone, where fewer than ``NUM_STREAMS`` others live.
    """
    return f"{RECORDING} {_STREAM_POOL.take(owner)}"
