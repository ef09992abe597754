"""Models that several threads train: who records now, and on which streams."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CaptureLock:
    """Lets one thread at a time record. Nobody waits for it: who doesn't get it runs a step as it is, and asks again.

    A recording needs autograd's threads, of which each GPU has one for all models, and locks of models that it uses.
    Who waited for its end in one of these threads, or with one of these locks, would wait forever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._put_off: list[Callable[[], None]] = []

    @contextmanager
    def taken(self) -> Iterator[bool]:
        """Take the turn for what is within; False where another thread has it, or this one already."""
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
            function: Called at once, or, where somebody has the turn, by that thread later.
        """
        self._put_off.append(function)
        self._catch_up_if_free()

    def catch_up(self) -> None:
        """Call what was put off; for the thread that has the turn, while it captures nothing."""
        while self._put_off:
            self._put_off.pop()()

    def _catch_up_if_free(self) -> None:
        # Looked at again after each release: what came in between found the lock taken.
        while self._put_off and self._lock.acquire(blocking=False):
            try:
                self.catch_up()
            finally:
                self._lock.release()


class StreamPool:
    """Numbers that owners have for as long as they live, each its own where there are enough.

    Args:
        num: How many there are.
    """

    def __init__(self, num: int) -> None:
        self._choosing = threading.RLock()
        self._owners: list[weakref.WeakSet[object]] = [weakref.WeakSet() for _ in range(num)]

    def take(self, owner: object) -> int:
        """Return a number that nobody has, the lowest; where there is none, one that the fewest have."""
        with self._choosing:
            sizes = list(map(len, self._owners))
            lane = sizes.index(min(sizes))
            self._owners[lane].add(owner)
            return lane


RECORDING = "recording"
"""Which stream of each GPU work is recorded on that is never run in another way."""

NUM_STREAMS = 8
"""How many models have streams of their own at a time; torch has 32 for each GPU, for all purposes."""

CAPTURE_LOCK = CaptureLock()
"""Of the process."""

_STREAM_POOL = StreamPool(NUM_STREAMS)


def lease_streams(owner: object) -> str:
    """Say on which stream of each GPU an owner's work is recorded that may also be run as it is.

    Autograd runs nodes where they were recorded, at any time. On a stream that another thread records on meanwhile,
    that would become part of the recording.

    Args:
        owner: Has them to itself until it is gone, where fewer than ``NUM_STREAMS`` others live.
    """
    return f"{RECORDING} {_STREAM_POOL.take(owner)}"
