"""Helpers that one engine after another uses: starting one takes seconds, which is most of a test's time."""

import copy
import importlib
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

import pytest
import torch

from everygpu.parallel.engines.processes.helper_process import HelperProcess


class HelperPool:
    """Keeps helpers that engines need no more for the next engines. A helper takes in a new module at any call."""

    def __init__(self, starting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Enter ``starting()`` where a helper is started."""
        self._starting = starting
        self._free: dict[str, list[PooledHelper]] = defaultdict(list)
        self._started: list[PooledHelper] = []
        self._returns: list[weakref.finalize[..., PooledHelper]] = []

    def make_helper(self, device: torch.device, position: int) -> "PooledHelper":
        """Return a free helper, or start one. It is free again when an engine and its graphs have dropped it."""
        free = self._free[str(device)]
        while free and free[-1].is_lost:
            free.pop()
        if free:
            helper = free.pop()
        else:
            with self._starting():
                helper = PooledHelper(device, position)
            self._started.append(helper)
        lent = copy.copy(helper)
        lent.serve_at(position)
        self._returns.append(weakref.finalize(lent, free.append, helper))
        self._returns[-1].atexit = False
        return lent

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Have engines take helpers from here within; afterwards all are free."""
        module = importlib.import_module("everygpu.parallel.engines.processes.engine")
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(module, "HelperProcess", self.make_helper)
            try:
                yield
            finally:
                while self._returns:
                    self._returns.pop()()

    def close(self) -> None:
        """End all helpers."""
        for helper in self._started:
            helper.end()
        self._started, self._free = [], defaultdict(list)


class PooledHelper(HelperProcess):
    """A helper that an engine doesn't end."""

    pids: ClassVar[set[int]] = set()

    def __init__(self, device: torch.device, position: int) -> None:
        before = set(threading.enumerate())
        super().__init__(device, position)
        self.wait_until_ready()
        self.pids.add(self._child._process.pid)
        for thread in set(threading.enumerate()) - before:
            thread.name = "pooled-helper"

    def serve_at(self, position: int) -> None:
        """Become the helper of another replica on the device."""
        self.position, self._name = position, f"replica {position} on {self.device}"

    def hang_up(self) -> None:
        pass

    def close(self) -> None:
        pass

    def end(self) -> None:
        """End the helper."""
        super().hang_up()
        super().close()
