"""One capture at a time in a process."""

import threading
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
        """Call a function that waits for all of a GPU's streams, which CUDA forbids while one of them is captured: at
        once, or, while a thread holds the lock, by that thread later.
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


CAPTURE_LOCK = CaptureLock()
"""Of the process, as CUDA's rules on capturing are."""
