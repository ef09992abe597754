"""Copies from host memory to devices: through pinned memory, on side streams that overlap the computation.

A copy on the compute stream waits for all that was queued there before. And a copy from pageable memory makes the
driver wait for the stream as well, so that the host can't run ahead of the device.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from everygpu import comm
from everygpu.comm.streams import kept_stream

STAGE_FROM_BYTES = 64 * 1024
"""The driver takes smaller copies from pageable memory at once, without waiting: staging them costs more.

Source: "API synchronization behavior" in NVIDIA's documentation of the CUDA runtime.
"""

UPLOADS = "uploads"
"""Which stream a device's copies from the host are queued on."""

Mark = tuple[torch.device, torch.cuda.Event]
"""Until when a device's copies were queued."""


def upload(part: Tensor, device: torch.device) -> Tensor:
    """Queue a copy to a device, without waiting for it: on CUDA to be used only after ``receive``; until it is done the
    original may not be written. Without gradients.
    """
    if device.type != "cuda":
        return comm.copy(part, device)
    stream = kept_stream(device, UPLOADS)
    with torch.cuda.stream(stream):
        if part.device.type == "cuda":
            # torch queues a copy between GPUs on the source's current stream, and has this one wait for it.
            stream.wait_stream(torch.cuda.current_stream(part.device))
        return comm.copy(_staged(part), device)


def mark(devices: Iterable[torch.device]) -> list[Mark]:
    """Note how far the devices' copy streams have been filled."""
    return [(d, kept_stream(d, UPLOADS).record_event()) for d in dict.fromkeys(devices) if d.type == "cuda"]


def receive(tensors: Sequence[Tensor], marks: Iterable[Mark]) -> None:
    """Let the current streams use copies that were queued before the marks, for which they wait, not the host.

    The copies' memory is used again only when the work is done that is queued on these streams as they are dropped.
    """
    for device, event in marks:
        torch.cuda.current_stream(device).wait_event(event)
    for t in tensors:
        if t.device.type == "cuda":
            t.record_stream(torch.cuda.current_stream(t.device))


def _staged(part: Tensor) -> Tensor:
    """Return pinned memory with the same values and strides, if that makes the copy sooner done."""
    is_plain = type(part) is Tensor and part.layout == torch.strided and part.device.type == "cpu"
    if not is_plain or part.nbytes < STAGE_FROM_BYTES or part.is_pinned():
        return part
    # torch frees this memory for the next one when the copy queued from it is done.
    return torch.empty_like(part, pin_memory=True).copy_(part)
