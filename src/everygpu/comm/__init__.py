"""Moving whole buffers between devices: one interface, the fastest transfer that serves.

Every function works on flat buffers, one per device, and is ordered after the work already queued on the
devices' current streams: NCCL among three GPUs or more, plain copies elsewhere.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from everygpu.comm import copies, nccl


def broadcast(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy one buffer into others.

    Args:
        source: Shape (numel,), contiguous.
        targets: Buffers of the same shape and dtype, on any devices; overwritten.
    """
    if len(targets) > 1 and nccl.can_serve([source, *targets]):
        nccl.broadcast(source, targets)
    else:
        copies.broadcast(source, targets)


def reduce(sources: Sequence[Tensor], device: torch.device) -> Tensor:
    """Add buffers up on one device.

    Args:
        sources: At least one contiguous buffer of shape (numel,), each on any device; the first may be
            overwritten. Copies add in the order given, NCCL in an order of its own.
        device: Where the sum goes.
    Returns:
        The sum, shape (numel,), on ``device``.
    """
    here = torch.empty(0, device=device)
    if len(sources) > 1 and nccl.can_serve([here, *sources]):
        return nccl.reduce(sources, device)
    return copies.reduce(sources, device)
