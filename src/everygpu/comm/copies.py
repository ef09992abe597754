"""Transfers by plain copies: on the CPU, and over peer access or host memory between GPUs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from everygpu.comm.streams import kept_stream


def copy(x: Tensor, device: torch.device, *, fresh: bool = False) -> Tensor:
    """Copy a tensor to a device; ``fresh``: also if it is there already."""
    if x.requires_grad and x.is_cuda and device.type == "cuda" and x.device != device and _is_capturing():
        return _RecordedCopy.apply(x, device)  # type: ignore[no-untyped-call, no-any-return]
    # Who reads host memory doesn't ask whether the copy is done.
    return x.to(device, non_blocking=device.type != "cpu", copy=fresh)


class _RecordedCopy(torch.autograd.Function):
    """A copy between GPUs whose backward can be part of a CUDA graph, too.

    Autograd copies gradients back on the thread of the device they come from, where the other device's current
    stream is none of the graph's.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device) -> Tensor:
        ctx.stream = torch.cuda.current_stream(x.device)
        return x.to(device, non_blocking=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.cuda.stream(ctx.stream), torch.cuda.device(grads[0].device):
            return copy(grads[0], ctx.stream.device), None


def fill(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into another of the same shape."""
    target.copy_(source, non_blocking=target.device.type != "cpu")


def broadcast(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy one buffer into each of the others."""
    for index, target in enumerate(targets):
        with _beside(source, index):
            fill(target, source)


@contextmanager
def _beside(source: Tensor, index: int) -> Iterator[None]:
    """In a CUDA graph, queue a copy from a GPU beside what comes next there; who uses the target waits for it."""
    if not (source.is_cuda and _is_capturing()):
        yield
        return
    stream = kept_stream(source.device, f"broadcast {index}")
    stream.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(stream):
        yield
    source.record_stream(stream)


def reduce(sources: Sequence[Tensor], device: torch.device) -> Tensor:
    """Add buffers up on one device, in the order given; the first may be overwritten."""
    total = copy(sources[0], device)
    for source in sources[1:]:
        total.add_(copy(source, device))
    return total


def _is_capturing() -> bool:
    """Tell whether what is queued now becomes part of a CUDA graph."""
    return bool(torch.cuda.is_current_stream_capturing())
