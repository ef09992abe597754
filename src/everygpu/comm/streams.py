"""Streams of our own, beside those that users compute on."""

import functools

import torch


@functools.cache
def kept_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return a CUDA device's stream for a purpose, the same every time.

    Libraries keep memory for each stream. And torch has 32 per device, then hands out those that others use: work
    of theirs would be recorded with ours, or wait for it.

    Args:
        device: A CUDA device.
        purpose: Any name; different ones have different streams.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
