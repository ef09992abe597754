"""Transfers by plain copies: on the CPU, and over peer access or host memory between GPUs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from everygpu.comm.streams import kept_stream

SMALL_BYTES = 2**20
"""Up to here a kernel that writes to the other GPU is done before a copy would begin."""

LONG_BYTES = 2**22
"""From here on a copy takes longer than Python does to queue it on a stream of its own."""

# Facts about the process: which GPUs' kernels have written to which other GPUs. A capture may replay these, but
# load no new ones; in a graph of the user's own, perhaps none was loaded.
_linked: set[tuple[torch.device, torch.device]] = set()


def copy(x: Tensor, device: torch.device, *, fresh: bool = False) -> Tensor:
    """Copy a tensor to a device; ``fresh``: also if it is there already."""
    if x.is_cuda and device.type == "cuda" and x.device != device and _is_capturing():
        if x.requires_grad:
            x = with_own_node(x, device)
            return _CapturableCopy.apply(x, device)  # type: ignore[no-untyped-call, no-any-return]
        return _copy_in_graph(x, device)
    x = with_own_node(x, device)
    # Nothing orders reads of host memory after a copy, so copies to the host are synchronous.
    return x.to(device, non_blocking=device.type != "cpu", copy=fresh)


def with_own_node(x: Tensor, device: torch.device) -> Tensor:
    """Return a view of a leaf that goes to another GPU, and any other tensor as it is.

    A leaf's gradient then comes from a node on its own device. From the other GPU's stream autograd takes it with a
    warning, "The AccumulateGrad node's stream does not match".
    """
    is_alone = x.is_cuda and device.type == "cuda" and x.device != device and x.requires_grad and x.is_leaf
    return x.view_as(x) if is_alone and x.layout is torch.strided else x


def copy_to_each(x: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """Copy a tensor to several devices; ``x`` itself where it is already."""
    found = []
    for index, device in enumerate(devices):
        # Gradients come back on the stream of the copy, and what they are added to waits for the device's own only.
        with nullcontext() if device == x.device or x.requires_grad else _on_side_stream(x, index):
            found.append(copy(x, device))
    return found


def copy_from_each(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors from several devices to one; those that are there already stay."""
    if not (device.type == "cuda" and _is_capturing()):
        return [copy(t, device) for t in tensors]
    found = [t if t.device == device else torch.empty_like(t, device=device) for t in tensors]
    home = torch.cuda.current_stream(device)
    # Each on a stream of its own: torch has a copy wait for what comes before it on both devices' streams.
    streams = []
    for index, (target, source) in enumerate(zip(found, tensors)):
        if target is not source:
            stream = kept_stream(device, f"copy from {index}")
            stream.wait_stream(home)
            with torch.cuda.stream(stream):
                fill(target, source)
            streams.append(stream)
    for stream in streams:
        home.wait_stream(stream)
    return found


class _CapturableCopy(torch.autograd.Function):
    """A copy between GPUs whose backward can also be part of a CUDA graph.

    Autograd copies gradients back on the thread of the device they come from. There, the other device's current
    stream isn't one that the graph captures.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device) -> Tensor:
        ctx.stream = torch.cuda.current_stream(x.device)
        return _copy_in_graph(x, device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.cuda.stream(ctx.stream), torch.cuda.device(grads[0].device):
            return copy(grads[0], ctx.stream.device), None


def fill(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into another of the same shape."""
    if source.is_cuda and target.is_cuda and _is_capturing() and _is_for_push(target, source):
        push(target, source)
        if not target.is_inference():
            increment_version(target)
    else:
        target.copy_(source, non_blocking=target.device.type != "cpu")


def link(source: torch.device, target: torch.device) -> None:
    """Load what writes from one GPU to another, which must reach each other, so that captures may use it."""
    x = torch.zeros(1, device=source)
    push(torch.zeros(1, device=target), x)
    _linked.add((source, target))


def can_push(source: Tensor, device: torch.device) -> bool:
    """Whether a tensor is copied to a device by ``push`` in a CUDA graph, whose copies take long to begin."""
    return (source.device, device) in _linked and 0 < source.nbytes <= SMALL_BYTES and _is_raw(source)


def _is_for_push(target: Tensor, source: Tensor) -> bool:
    is_same_kind = target.shape == source.shape and target.dtype is source.dtype and _is_raw(target)
    return is_same_kind and can_push(source, target.device)


def push(target: Tensor, source: Tensor) -> None:
    """Copy bytes between GPUs by a kernel, which writes to the other one, in turn with both devices' streams."""
    from everygpu.comm import kernels  # needs Triton, which not every machine has

    here, there = torch.cuda.current_stream(source.device), torch.cuda.current_stream(target.device)
    here.wait_stream(there)
    with torch.cuda.device(source.device):
        kernels.run_copy(target, source)
    there.wait_stream(here)


def _is_raw(x: Tensor) -> bool:
    """Whether a tensor's values are the bytes from its address on, in whole words."""
    is_plain = type(x) in (Tensor, nn.Parameter) and not (x.is_conj() or x.is_neg() or x._is_zerotensor())
    return is_plain and x.is_contiguous() and x.nbytes % 4 == 0 and x.data_ptr() % 4 == 0


def _copy_in_graph(x: Tensor, device: torch.device) -> Tensor:
    if not can_push(x, device):
        return x.to(device, non_blocking=True)
    target = torch.empty_like(x, device=device)
    push(target, x)
    return target


def broadcast(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy one buffer into each of the others."""
    for index, target in enumerate(targets):
        # What reads the target waits for copies from another device alone.
        with nullcontext() if target.device == source.device else _on_side_stream(source, index):
            fill(target, source)


@contextmanager
def _on_side_stream(source: Tensor, index: int) -> Iterator[None]:
    """Queue a long copy on a side stream, so that it overlaps the GPU's next work; readers of the target wait for it.

    In a CUDA graph another stream costs nothing.
    """
    if not source.is_cuda or (source.nbytes < LONG_BYTES and not _is_capturing()):
        yield
        return
    stream = kept_stream(source.device, f"broadcast {index}")
    stream.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(stream):
        yield
    source.record_stream(stream)


def reduce(sources: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum buffers on one device, in the order given; the first may be overwritten."""
    total = copy(sources[0], device)
    for source in sources[1:]:
        total.add_(copy(source, device))
    return total


def _is_capturing() -> bool:
    """Whether work that is queued now is captured by a CUDA graph."""
    return bool(torch.cuda.is_current_stream_capturing())
