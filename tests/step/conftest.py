"""Where steps are recorded."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests import tape

Devices = Callable[[int], list[torch.device]]


@pytest.fixture(params=["fused", "unfused"])
def recording(request: pytest.FixtureRequest, devices: Devices, monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """``devices`` that steps are recorded on: GPUs, or CPU replicas, where CUDA graphs are acted out."""
    is_fused = request.param == "fused"
    if devices(2)[0].type == "cpu":
        tape.install(monkeypatch, fused=is_fused)
        yield devices
        return
    if not is_fused:
        monkeypatch.setattr("everygpu.step.holders.can_fuse", lambda *_: False)
    torch.cuda.manual_seed_all(0)
    yield devices
    torch.cuda.synchronize()
