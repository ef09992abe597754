"""Side streams: everygpu's own, next to those that users compute on, and how work is queued on them."""

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

NOTHING = nullcontext()
"""A context that may be entered again and again: making one takes as long as a small operation."""

_making = threading.RLock()


def kept_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return a CUDA device's stream for a purpose, the same every time.

    Libraries keep memory for each stream. And torch has a pool of 32 per device, after which streams repeat: others'
    work on the same stream would be captured with ours, or wait for it.
    """
    with _making:  # or two threads that ask first would each get one of their own
        return _stream(device, purpose)


@functools.cache
def _stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def synchronize_streams(devices: Sequence[torch.device]) -> None:
    """Make all devices' current streams wait for each other, as kernels read and write the others' memory."""
    streams = [torch.cuda.current_stream(d) for d in devices if d.type == "cuda"]
    events = [stream.record_event() for stream in streams]
    for stream in streams:
        for other, event in zip(streams, events):
            if other is not stream:
                stream.wait_event(event)


def current_stream(device: torch.device) -> "torch.cuda.Stream | None":
    """Return what work for a device is queued on now; None for devices without streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@contextmanager
def queueing_on(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Queue the block's work on a device, and on one of its streams; the current one if left out."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream or torch.cuda.current_stream(device)):
        yield


@contextmanager
def queueing_on_each(devices: Sequence[torch.device], streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Queue the block's work for several devices on one stream each; the first device is current."""
    with ExitStack() as stack:
        for device, stream in reversed(list(zip(devices, streams))):
            stack.enter_context(queueing_on(device, stream))
        yield


class Streams:
    """The streams of a forward, made current again in its backward.

    Autograd restores only the stream of the device whose thread runs a node; a node that touches several
    devices needs all of them.
    """

    def __init__(self, *devices: torch.device) -> None:
        cuda = dict.fromkeys([d for d in devices if d.type == "cuda"])
        self._streams = [torch.cuda.current_stream(d) for d in cuda]

    def current(self) -> AbstractContextManager[object]:
        """Make them current within."""
        others = [s for s in self._streams if torch.cuda.current_stream(s.device) != s] if self._streams else []
        if not others:
            return NOTHING
        stack = ExitStack()
        for stream in others:
            stack.enter_context(torch.cuda.stream(stream))
        return stack
