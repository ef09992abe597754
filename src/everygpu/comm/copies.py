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
