"""The channel between the thread that prepares batches and the one that uses them."""

import threading
import time
from collections import deque
from typing import Generic, NoReturn, TypeVar

from everygpu.errors import FeedTimeoutError

T = TypeVar("T")

_POLL_S = 0.2
"""Waiting is cut into pieces of this length: on Windows, Ctrl-C gets through only in between."""


class ChannelClosed(Exception):  # noqa: N818 - no error: the other side has left
    """The consumer has left: the thread that prepares batches can go."""


class Channel(Generic[T]):
    """A queue of limited length that either side can end.

    Args:
        capacity: How many items may wait, 1 or more.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_finished = False
        self._error: BaseException | None = None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def wait_for_room(self) -> None:
        """Wait until an item may be put.

        Raises:
            ChannelClosed: the consumer has left.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self._capacity)
            if self._is_closed:
                raise ChannelClosed

    def put(self, item: T) -> None:
        """Add an item; by the one producer, which has waited for room."""
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        """Say that nothing more will come, because of an error or because that was all."""
        with self._changed:
            self._is_finished, self._error = True, error
            self._changed.notify_all()

    def get(self, producer: threading.Thread, timeout_s: float | None = None) -> T:
        """Take the oldest item, waiting for one.

        Args:
            producer: Without it nothing can come any more.
            timeout_s: How long to wait; None for as long as it takes.
        Raises:
            StopIteration: nothing more will come.
            FeedTimeoutError: nothing came in time; the message is the caller's to write.
            BaseException: what the producer ended with.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._items and not self._is_finished and not self._is_closed:
                left = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
                if left <= 0:
                    raise FeedTimeoutError
                self._changed.wait(left)
                if not producer.is_alive():
                    break
            if not self._items:
                self._raise_end()
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def _raise_end(self) -> NoReturn:
        # Kept no longer than needed: a traceback holds all that its frames refer to.
        error, self._error = self._error, None
        try:
            raise StopIteration if error is None else error  # an error with a length of 0 is one, too
        finally:
            del error

    def close(self) -> None:
        """Let go of everything; the producer ends at its next step."""
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self._error = None
            self._changed.notify_all()
