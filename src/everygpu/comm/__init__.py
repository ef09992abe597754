"""Moving whole buffers between devices: the one place that does it.

Every function works on flat buffers, one per device, and is ordered after the work already queued on the
devices' current streams. Here the transfers are plain copies, which torch does over peer access where the
hardware has it, and through host memory where not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def broadcast(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy one buffer into others.

    Args:
        source: Shape (numel,).
        targets: Buffers of the same shape and dtype, on any devices; overwritten.
    """
    for target in targets:
        target.copy_(source, non_blocking=True)


def reduce(sources: Sequence[Tensor], device: torch.device) -> Tensor:
    """Add buffers up on one device, in the order given.

    Args:
        sources: At least one buffer of shape (numel,), each on any device; the first may be overwritten.
        device: Where the sum goes.
    Returns:
        The sum, shape (numel,), on ``device``.
    """
    total = sources[0].to(device, non_blocking=True)
    for source in sources[1:]:
        total.add_(source.to(device, non_blocking=True))
    return total
