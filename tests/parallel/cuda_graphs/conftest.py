"""Devices on which forwards are captured."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from tests import tape

Devices = Callable[[int], list[torch.device]]


@pytest.fixture
def capturing(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """``devices`` for captures: GPUs, or CPU replicas, where CUDA graphs are acted out."""
    tape.prepare(devices(2), monkeypatch, fused=True)
    if devices(2)[0].type == "cuda":
        torch.cuda.manual_seed_all(0)
    yield devices
    if devices(2)[0].type == "cuda":
        torch.cuda.synchronize()
    gc.collect()  # exceptions that were expected hold models, which hold threads
