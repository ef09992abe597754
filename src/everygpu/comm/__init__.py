"""Moving whole buffers between devices: one interface, the fastest transfer that serves.

Every function works on flat buffers, one per device, and is ordered after the work already queued on the
devices' current streams: NCCL among three GPUs or more, plain copies elsewhere. A buffer's chunks are as many
equal parts of it as there are devices; the j-th is device j's own.
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


def reduce_scatter(buffers: Sequence[Tensor]) -> None:
    """Add buffers up, each device getting the sum of its own chunk.

    Args:
        buffers: One per device, contiguous, of shape (numel,) and one dtype; numel is a multiple of their
            number. Chunk j of buffer j becomes the sum of all j-th chunks; what the others hold is undefined.
    """
    if len(buffers) > 2 and nccl.can_serve(buffers):
        nccl.reduce_scatter(buffers)
    else:
        copies.reduce_scatter(buffers)


def all_gather(buffers: Sequence[Tensor]) -> None:
    """Copy each device's own chunk into the other devices' buffers.

    Args:
        buffers: As for ``reduce_scatter``; afterwards they are equal.
    """
    if len(buffers) > 2 and nccl.can_serve(buffers):
        nccl.all_gather(buffers)
    else:
        copies.all_gather(buffers)


def scatter(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy the chunks of one buffer to their devices.

    Args:
        source: Shape (numel,), on any device.
        targets: Shape (numel / their number,) each; overwritten.
    """
    copies.scatter(source, targets)


def gather(sources: Sequence[Tensor], target: Tensor) -> None:
    """Copy chunks from their devices into one buffer; the reverse of ``scatter``."""
    copies.gather(sources, target)
