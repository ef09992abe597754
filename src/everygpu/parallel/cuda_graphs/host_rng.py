"""Random numbers that the host draws or reads: a capture would repeat them, or can't have them in it."""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everygpu.torch_private.core import TorchDispatchMode, tree_flatten


class DrawGate:
    """Excludes threads that load batches during a capture: both may draw from the process's generators."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_drawing = self._num_alone = 0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw within, concurrently with others, while no capture runs."""
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
        """Block threads that draw, within; yield False if one has not finished in time."""
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
    """Random generators on the host that a step may draw from: the process's, and others that it reaches."""

    def __init__(self, others: Sequence[Any]) -> None:
        on_host = [g for g in others if not isinstance(g, torch.Generator) or g.device.type == "cpu"]
        self._all: list[Any] = [random, np.random, torch.default_generator, *on_host]

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


def _state_of(generator: Any) -> Any:
    read = getattr(generator, "getstate", None) or getattr(generator, "get_state", None)
    return generator.bit_generator.state if read is None else read()


def is_same_state(a: Any, b: Any) -> bool:
    """Whether two states of one generator are equal: numbers, arrays, tensors, or containers of these."""
    if isinstance(a, dict):
        return all(is_same_state(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return all(map(is_same_state, a, b))
    return bool((a == b).all()) if hasattr(a, "shape") else bool(a == b)


class IdleDraws(TorchDispatchMode):
    """Counts draws of ``torch.rand([])`` that decide nothing: they are only asked whether they are below 0, or less.

    As by transformers' LayerDrop where its probability is 0. What other functions draw isn't counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num: int | None = 0
        """None where a draw is used in another way."""
        self._drawn: list[Tensor] = []
        self._answers: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, first = func.name(), args[0] if args else None
        if name == "aten::rand" and not first and result.device.type == "cpu":
            self._drawn.append(result)
            self.num = None if self.num is None else self.num + 1
        elif name == "aten::detach" and _is_among(first, self._drawn):
            self._drawn.append(result)
        elif name == "aten::lt.Scalar" and _is_among(first, self._drawn) and args[1] <= 0:
            self._answers.append(result)
        elif name != "aten::_local_scalar_dense" or not _is_among(first, self._answers):
            known = [*self._drawn, *self._answers]
            is_used = any(_is_among(x, known) for x in tree_flatten((args, kwargs))[0])
            self.num = None if is_used else self.num
        return result


def draw_idly(num: int) -> None:
    """Draw as ``torch.rand([])`` does, so that what is drawn next is as in a step that is not captured."""
    for _ in range(num):
        torch.rand((), device="cpu")


def _is_among(x: Any, tensors: Sequence[Tensor]) -> bool:
    return any(x is t for t in tensors)


def keeps_dropout_state(roots: Sequence[nn.Module]) -> bool:
    """Whether there are recurrent layers with dropout, for which cuDNN keeps a random state per GPU."""
    return any(isinstance(m, nn.RNNBase) and m.training and m.dropout for root in roots for m in root.modules())


def draw_seeds(roots: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Make cuDNN draw the seed of recurrent layers' dropout now, unless it has.

    It does so in the first call after a generator's state was set, by reading a random number back from the GPU, which
    can't be captured. Dynamo sets the state, and so does a replay.

    Source: ``get_dropout_state`` in PyTorch's ``aten/src/ATen/native/cudnn/RNN.cpp``.
    """
    for device in devices if keeps_dropout_state(roots) else ():
        if device.type == "cuda":
            smallest = nn.RNN(1, 1, num_layers=2, dropout=0.5, device=device)
            with torch.no_grad(), torch.autocast("cuda", enabled=False):
                smallest(torch.zeros(1, 1, 1, device=device))
