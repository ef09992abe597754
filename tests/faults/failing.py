"""A model that fails in one replica."""

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 2
"""Of each replica."""


class TwoArgumentsError(Exception):
    """Made of more than its message, as exceptions of HTTP clients and parsers are."""

    def __init__(self, name: str, *, line: int) -> None:
        super().__init__(f"{name}:{line}")
        self.line = line


class BusyError(OSError):
    """Has an attribute that can't be copied."""

    def __init__(self) -> None:
        super().__init__(16, "busy")
        self.lock = threading.Lock()


def raise_as(kind: str) -> None:
    """Raise an exception."""
    if kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB")
    if kind == "two arguments":
        raise TwoArgumentsError("net", line=3)
    if kind == "busy":
        raise BusyError
    raise KeyError("missing")


class FailingBackward(torch.autograd.Function):
    """Returns its input; fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise_as(ctx.kind)


class Net(nn.Module):
    """Fails where its attributes say; knows which of its activations are alive in its process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.place, self.kind, self.replica = "", "memory", 0

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "nowhere, count":
            return x.new_full((len(x), 2), sum(ref() is not None for ref in _held()))
        h = hold(self.first(hold(x * 1.0))).tanh()
        if bool((x[:, 0] == self.replica).all()):
            h = self.fail(h)
        y: Tensor = self.last(h)
        return y

    def fail(self, h: Tensor) -> Tensor:
        """Do as told, in this replica."""
        if self.place == "forward":
            raise_as(self.kind)
        if self.place == "hook":
            h.register_hook(hook(self.kind))
        return FailingBackward.apply(h, self.kind) if self.place == "function" else h


def hook(kind: str) -> Callable[[Tensor], None]:
    """Return a hook that fails."""
    return lambda _: raise_as(kind)


def hold(t: Tensor) -> Tensor:
    """Take note of an activation."""
    _held().append(weakref.ref(t))
    return t


def _held() -> list[Any]:
    found: list[Any] = vars(sys.modules[__name__]).setdefault("held", [])
    return found


def make_batch(num_replicas: int) -> Tensor:
    """Return rows whose first column is their replica's number."""
    x = torch.randn(ROWS * num_replicas, 4, generator=torch.Generator().manual_seed(1))
    x[:, 0] = torch.arange(num_replicas).repeat_interleave(ROWS)
    return x


class CompiledNet(Net):
    """Has what fails between two graphs of the compiler."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _uncompiled(self, x * 1.0)
        return y * 1.0


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(net: Net, x: Tensor) -> Tensor:
    return Net.forward(net, x)


class CapturableNet(Net):
    """Fails nowhere itself, and asks its inputs nothing."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(hold(self.first(x)).tanh())
        return y
