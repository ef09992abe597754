"""How parameters and gradients travel in recordings."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests import tape

Devices = Callable[[int], list[torch.device]]


@pytest.fixture(params=["kernels", "copies"])
def either_way(request: pytest.FixtureRequest, devices: Devices, monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """``devices`` for recordings: GPUs, or CPU replicas, where CUDA graphs are acted out."""
    by_kernels = request.param == "kernels"
    if devices(2)[0].type == "cpu":
        tape.install(monkeypatch, fused=by_kernels)
        yield devices
        return
    if not by_kernels:
        monkeypatch.setattr("everygpu.parallel.recording.bundle.can_use_kernels", lambda *_: False)
    yield devices
    torch.cuda.synchronize()
