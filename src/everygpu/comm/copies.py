"""Transfers by plain copies: on the CPU, and over peer access or host memory between GPUs."""

from collections.abc import Sequence

import torch
from torch import Tensor


def broadcast(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy one buffer into each of the others."""
    for target in targets:
        target.copy_(source, non_blocking=True)


def reduce(sources: Sequence[Tensor], device: torch.device) -> Tensor:
    """Add buffers up on one device, in the order given; the first may be overwritten."""
    total = sources[0].to(device, non_blocking=True)
    for source in sources[1:]:
        total.add_(source.to(device, non_blocking=True))
    return total


def reduce_scatter(buffers: Sequence[Tensor]) -> None:
    """Add the j-th chunks of all buffers up in the j-th buffer, in their order."""
    for own, column in enumerate(zip(*(b.chunk(len(buffers)) for b in buffers))):
        total = column[0].to(column[own].device, non_blocking=True, copy=own > 0)
        for chunk in column[1:]:
            total.add_(chunk.to(total.device, non_blocking=True))
        if own > 0:
            column[own].copy_(total)


def all_gather(buffers: Sequence[Tensor]) -> None:
    """Copy the j-th buffer's j-th chunk into the other buffers."""
    for own, column in enumerate(zip(*(b.chunk(len(buffers)) for b in buffers))):
        broadcast(column[own], (*column[:own], *column[own + 1 :]))


def scatter(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy the chunks of one buffer to their devices."""
    for chunk, target in zip(source.chunk(len(targets)), targets):
        target.copy_(chunk, non_blocking=True)


def gather(sources: Sequence[Tensor], target: Tensor) -> None:
    """Copy chunks from their devices into one buffer."""
    for chunk, source in zip(target.chunk(len(sources)), sources):
        chunk.copy_(source, non_blocking=True)
