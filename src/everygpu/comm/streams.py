"""Streams for copies, beside the streams of the computation."""

import functools
import threading
from collections.abc import Sequence

import torch

_making = threading.RLock()


def kept_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return a CUDA device's stream for a purpose, the same every time.

    Libraries keep memory for each stream. And torch has 32 per device, then hands out those that others use: work
    of theirs would be recorded with ours, or wait for it.

    Args:
        device: A CUDA device.
        purpose: Any name; different ones have different streams.
    """
    with _making:  # or two threads that ask first would each get one of their own
        return _stream(device, purpose)


@functools.cache
def _stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def synchronize_streams(devices: Sequence[torch.device]) -> None:
    """Have all devices' current streams wait for each other, as kernels read and write the others' memory."""
    streams = [torch.cuda.current_stream(d) for d in devices if d.type == "cuda"]
    events = [stream.record_event() for stream in streams]
    for stream in streams:
        for other, event in zip(streams, events):
            if other is not stream:
                stream.wait_event(event)
