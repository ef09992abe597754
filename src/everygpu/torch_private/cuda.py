"""CUDA's caching allocator, library workspaces, NCCL and Triton."""

from typing import Any

import torch
from torch.utils._triton import has_triton as _has_triton


def route_stream_to_pool(device: torch.device, pool: Any) -> None:
    """Allocate what is asked for on a device's current stream from a graph's pool, in all threads.

    ``torch.cuda.graph`` does so for the capturing device only, ``torch.cuda.use_mem_pool`` for one thread.
    """
    torch._C._cuda_beginAllocateCurrentStreamToPool(device.index, pool)


def end_route_to_pool(device: torch.device, pool: Any) -> None:
    """End ``route_stream_to_pool``; raises a RuntimeError where it hadn't begun."""
    torch._C._cuda_endAllocateToPool(device.index, pool)


def release_pool(device: torch.device, pool: Any) -> None:
    """Give up a pool that ``route_stream_to_pool`` took: its memory is returned with the last tensor in it."""
    torch._C._cuda_releasePool(device.index, pool)


def clear_cublas_workspaces() -> None:
    """Drop cuBLAS's workspaces, as torch's CUDA graph trees do before a capture: a graph gets its own."""
    torch._C._cuda_clearCublasWorkspaces()


def has_nccl() -> bool:
    """Tell whether torch was built with NCCL; ``torch.cuda.nccl.is_available`` warns where it wasn't."""
    return hasattr(torch._C, "_nccl_all_reduce")


def has_triton() -> bool:
    """Tell whether Triton is installed and has a device to compile for; the module is torch's compiler's own."""
    return bool(_has_triton())
