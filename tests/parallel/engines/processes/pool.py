"""Helpers that one engine after another uses: starting one takes seconds, which is most of a test's time."""

import importlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from everygpu.parallel.engines.processes.helper_process import HelperProcess


class HelperPool:
    """Keeps the helpers that engines have closed, for the next engines. A helper takes in a new module at any call."""

    def __init__(self) -> None:
        self._free: dict[tuple[str, int], list[PooledHelper]] = defaultdict(list)
        self._lent: list[PooledHelper] = []

    def make_helper(self, device: torch.device, position: int) -> "PooledHelper":
        """Return a free helper, or start one."""
        free = self._free[str(device), position]
        helper = free.pop() if free else PooledHelper(device, position)
        helper.pool = self
        self._lent.append(helper)
        return helper

    def take_back(self, helper: "PooledHelper") -> None:
        """Have a helper that an engine needs no more."""
        if helper in self._lent:
            self._lent.remove(helper)
            if helper.is_alive():
                self._free[str(helper.device), helper.position].append(helper)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Have engines take helpers from here within; those that are left open are taken back at the end."""
        module = importlib.import_module("everygpu.parallel.engines.processes.engine")
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(module, "HelperProcess", self.make_helper)
            try:
                yield
            finally:
                for helper in list(self._lent):
                    self.take_back(helper)

    def close(self) -> None:
        """End all helpers."""
        for helper in [*self._lent, *(h for free in self._free.values() for h in free)]:
            helper.end()
        self._lent, self._free = [], defaultdict(list)


class PooledHelper(HelperProcess):
    """A helper that goes back to its pool when an engine closes it."""

    pool: HelperPool

    def __init__(self, device: torch.device, position: int) -> None:
        before = set(threading.enumerate())
        super().__init__(device, position)
        for thread in set(threading.enumerate()) - before:
            thread.name = "pooled-helper"

    def close(self) -> None:
        self.pool.take_back(self)

    def end(self) -> None:
        """End the helper."""
        super().close()
