"""Collectives over several GPUs of one process: the only module that calls NCCL.

A call launches one kernel per GPU, on the current streams, in one group. NCCL asks that a communicator is used by
one thread at a time, so calls are serialised.
"""

import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.cuda import nccl

from everygpu.torch_private.core import has_nccl

# NCCL's own state is per process: communicators are kept by torch, one for each list of devices.
_one_at_a_time = threading.Lock()


def can_serve(tensors: Sequence[Tensor]) -> bool:
    """Whether NCCL can move these buffers: on different GPUs, and none of what makes it hang.

    With CUDA_LAUNCH_BLOCKING=1 a launch waits for its kernel, which waits for the other GPUs' kernels, which
    the same thread has yet to launch. NVIDIA warns of the same for collectives of several GPUs in CUDA graphs.
    """
    devices = {t.device for t in tensors}
    if len(devices) < max(2, len(tensors)) or any(d.type != "cuda" for d in devices):
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    return has_nccl() and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") in ("", "0")


def broadcast(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy one buffer into each of the others; any dtype, as bytes."""
    buffers = [t.view(torch.uint8) for t in (source, *targets)]
    with _one_at_a_time:
        nccl.broadcast(buffers, root=0)


def reduce(sources: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum buffers on another device; floating point and complex."""
    total = torch.zeros(sources[0].shape, dtype=sources[0].dtype, device=device)
    buffers = [_as_real(t) for t in (total, *sources)]
    with _one_at_a_time:
        nccl.reduce(buffers, output=buffers[0], root=0)
    return total


def reduce_scatter(buffers: Sequence[Tensor]) -> None:
    """Sum the j-th chunks of all buffers in the j-th buffer; floating point and complex."""
    whole = [_as_real(b) for b in buffers]
    with _one_at_a_time:
        nccl.reduce_scatter(whole, _own_chunks(whole))


def all_gather(buffers: Sequence[Tensor]) -> None:
    """Copy the j-th buffer's j-th chunk into the other buffers; any dtype, as bytes."""
    whole = [b.view(torch.uint8) for b in buffers]
    with _one_at_a_time:
        nccl.all_gather(_own_chunks(whole), whole)


def _own_chunks(buffers: Sequence[Tensor]) -> list[Tensor]:
    return [b.chunk(len(buffers))[own] for own, b in enumerate(buffers)]


def _as_real(t: Tensor) -> Tensor:
    return torch.view_as_real(t).flatten() if t.is_complex() else t
