"""Random generators on the host, whose draws a recording would repeat."""

import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class DrawGate:
    """Keeps threads that load batches apart from recordings: both may draw from the process's generators."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_drawing = self._num_alone = 0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw within, beside others, once no recording goes on."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_alone)
            self._num_drawing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_drawing -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self, limit_s: float) -> Iterator[bool]:
        """Have those that draw wait within; False where one has not come to an end in time.

        Args:
            limit_s: How long it is waited for.
        """
        with self._changed:
            self._num_alone += 1
            is_alone = self._changed.wait_for(lambda: not self._num_drawing, limit_s)
        try:
            yield is_alone
        finally:
            with self._changed:
                self._num_alone -= 1
                self._changed.notify_all()


DRAW_GATE = DrawGate()
"""Of the process, as its generators are."""


class HostGenerators:
    """Random generators on the host that modules may draw from: the process's, and those among their attributes.

    Args:
        roots: The modules, with all below them.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        numpy = sys.modules.get("numpy")
        shared = [random, *([] if numpy is None else [numpy.random])]
        values = (v for root in roots for m in root.modules() for v in vars(m).values())
        own = list({id(v): v for v in values if _is_host_generator(v, numpy)}.values())
        self._all: list[Any] = [*shared, torch.default_generator, *own]

    def states(self) -> list[Any]:
        """Return the state of each."""
        return [_state_of(g) for g in self._all]

    def restore(self, states: Sequence[Any]) -> None:
        """Set each to a state that ``states`` returned."""
        for generator, state in zip(self._all, states):
            write = getattr(generator, "setstate", None) or getattr(generator, "set_state", None)
            if write is None:  # NumPy's newer ones
                generator.bit_generator.state = state
            else:
                write(state)


def _is_host_generator(value: Any, numpy: Any) -> bool:
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (random.Random, *kinds))


def _state_of(generator: Any) -> Any:
    read = getattr(generator, "getstate", None) or getattr(generator, "get_state", None)
    return generator.bit_generator.state if read is None else read()


def is_same_state(a: Any, b: Any) -> bool:
    """Tell whether two states of one generator are equal: numbers, arrays, tensors, or containers of these."""
    if isinstance(a, dict):
        return all(is_same_state(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return all(map(is_same_state, a, b))
    return bool((a == b).all()) if hasattr(a, "shape") else bool(a == b)
