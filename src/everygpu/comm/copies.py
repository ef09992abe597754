"""Transfers by plain copies: on the CPU, and over peer access or host memory between GPUs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from everygpu.comm.streams import kept_stream


def copy(x: Tensor, device: torch.device, *, fresh: bool = False) -> Tensor:
    """Copy a tensor to a device; ``fresh``: also if it is there already."""
    # Who reads host memory doesn't ask whether the copy is done.
    return x.to(device, non_blocking=device.type != "cpu", copy=fresh)


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
    if not (source.is_cuda and torch.cuda.is_current_stream_capturing()):
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
