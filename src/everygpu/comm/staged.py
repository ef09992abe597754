"""Transfers through pinned host memory, for GPUs whose direct copies can't be trusted.

Nothing waits for the copies: what reads host memory is ordered after what writes it by an event, and torch
keeps pinned memory until the copies that use it are done.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK_BYTES = 8 * 2**20  # small enough that the way out and the way in overlap


def copy(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to another device; differentiable, twice too."""
    if x.layout != torch.strided:
        return x.to("cpu").to(device, non_blocking=True)
    host = _host_like(x)
    host.copy_(x, non_blocking=x.is_cuda)
    _order(x.device, device)
    return host.to(device, non_blocking=True)


def fill(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into another of the same shape and dtype."""
    _send(source, [target])


def broadcast(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy one buffer into each of the others, leaving its device once."""
    step = max(1, _CHUNK_BYTES // max(1, source.element_size()))
    for start in range(0, source.numel(), step):
        _send(source[start : start + step], [target[start : start + step] for target in targets])


def reduce(sources: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum buffers on one device, in the order given; the first may be overwritten."""
    total, *rest = (s if s.device == device else copy(s, device) for s in sources)
    for source in rest:
        total.add_(source)
    return total


def _send(source: Tensor, targets: Sequence[Tensor]) -> None:
    host = _host_like(source)
    host.copy_(source, non_blocking=source.is_cuda)
    for target in targets:
        _order(source.device, target.device)
        target.copy_(host, non_blocking=True)


def _host_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)


def _order(first: torch.device, then: torch.device) -> None:
    """Make one device's current stream, or the host, wait for the work queued on another's."""
    if first.type != "cuda":
        return
    if then.type == "cuda":
        torch.cuda.current_stream(then).wait_stream(torch.cuda.current_stream(first))
    else:
        torch.cuda.current_stream(first).synchronize()
