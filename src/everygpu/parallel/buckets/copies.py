"""One tensor on several devices, and its gradients added up."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from everygpu import comm

NOTHING = nullcontext()
"""A context that may be entered again and again: making one takes as long as a small operation."""


def broadcast_tensor(x: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """Give every device a copy, the first ``x`` itself if it is there; gradients are summed in their order."""
    with keep_requires_grad(x):
        if x.requires_grad and torch.is_grad_enabled() and len(devices) > 1:
            # Autograd runs a node where its first output is.
            return list(_Copies.apply(comm.with_own_node(x, devices[0]), devices))  # type: ignore[no-untyped-call]
        # Replicas on one device must not share memory: one may write into it.
        return [comm.copy(x, device, fresh=i > 0) for i, device in enumerate(devices)]


def keep_requires_grad(x: Tensor) -> torch.set_grad_enabled:
    """Record what is made of an input that takes a gradient, also under ``no_grad``: the parts take one too."""
    return torch.set_grad_enabled(
        torch.is_grad_enabled() or (x.requires_grad and not torch.is_inference_mode_enabled())
    )


class _Copies(torch.autograd.Function):
    """Copy one tensor to several devices; add the gradients up in their order, whichever is ready first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, devices: Sequence[torch.device]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.home = x.device
        ctx.streams = Streams(x.device, *devices)
        return tuple(comm.copy(x.detach(), d, fresh=i > 0) for i, d in enumerate(devices))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        present = [g for g in grads if g is not None]
        with ctx.streams.current():
            return (sum_on(present, ctx.home) if present else None), None


class Streams:
    """The streams of a forward, made current again in its backward.

    Autograd restores only the stream of the device whose thread runs a node; a node that touches several
    devices needs all of them.
    """

    def __init__(self, *devices: torch.device) -> None:
        cuda = dict.fromkeys([d for d in devices if d.type == "cuda"])
        self._streams = [torch.cuda.current_stream(d) for d in cuda]

    def current(self) -> AbstractContextManager[object]:
        """Make them current within."""
        others = [s for s in self._streams if torch.cuda.current_stream(s.device) != s] if self._streams else []
        if not others:
            return NOTHING
        stack = ExitStack()
        for stream in others:
            stack.enter_context(torch.cuda.stream(stream))
        return stack


def sum_on(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Add tensors up on a device, in the order in which they are given."""
    # Dense + sparse is defined, sparse + dense is not.
    first, *rest = sorted(tensors, key=lambda t: t.layout != torch.strided)
    total = comm.copy(first, device)
    for t in rest:
        total = total + comm.copy(t, device)
    return total
