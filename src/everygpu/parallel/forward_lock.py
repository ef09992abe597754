"""One forward at a time: a wrapper's replicas serve one call."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Optional

from everygpu.errors import CallError
from everygpu.parallel.engines.scheduler import is_in_replica

# Which wrappers' forwards the present call is inside of, in this thread and in the replicas' threads.
_running: ContextVar[frozenset[object]] = ContextVar("everygpu_running", default=frozenset())


class ForwardLock:
    """Lets one thread at a time run a forward, within ``with lock.lock, lock.inside()``; others wait.

    Ctrl-C can come between any two lines: a plain lock that ``with`` takes is given back all the same, and a mark that
    stays in ``_running`` is not that of the call which has the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows: Sequence[int] = ()
        """Of the batch of the forward that has the lock, for each replica."""
        self.lent: Sequence[Any] = ()
        """Tensors whose shares are its replicas' inputs; see ``Call``."""
        self._call: object | None = None
        self._pid = os.getpid()

    @staticmethod
    def kept(before: Optional["ForwardLock"]) -> "ForwardLock":
        """Return the lock that threads may be waiting for; a new one at the start, and in a forked child."""
        return ForwardLock() if before is None or before.is_forked() else before

    def is_inside(self) -> bool:
        """Whether the present call is within the forward that has the lock."""
        return self._call in _running.get() and self.lock.locked()

    def is_forked(self) -> bool:
        """Whether this is a child's copy: a fork copies no threads, and locks as they were."""
        return self._pid != os.getpid()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Mark what runs within as the forward that has the lock."""
        self._call = object()
        token = _running.set(_running.get() | {self._call})
        try:
            yield
        finally:
            self.lent = ()
            _running.reset(token)

    def run_apart(self, function: Callable[[], Any]) -> None:
        """Call a function while no other thread runs a forward: at once in the verbs of one, and in a forked child."""
        if self.is_inside() and is_in_replica():
            raise CallError("DataParallel: a replica can't release its wrapper. Call release() after forward.")
        if self.is_forked() or self.is_inside():
            function()
            return
        with self.lock, self.inside():
            function()
