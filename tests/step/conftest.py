"""Where steps are captured."""

from collections.abc import Callable, Iterator

import pytest
import torch

Devices = Callable[[int], list[torch.device]]


@pytest.fixture(params=["fused", "unfused"])
def capturing(request: pytest.FixtureRequest, devices: Devices, monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """``devices`` that steps are captured on: GPUs, or CPU replicas, where CUDA graphs are acted out."""
    from tests import tape  # here, as it reaches into much of the package: not every test needs it

    used = devices(2)
    tape.prepare(used, monkeypatch, fused=request.param == "fused")
    if used[0].type == "cpu":
        yield devices
        return
    torch.cuda.manual_seed_all(0)
    yield devices
    torch.cuda.synchronize()


@pytest.fixture
def gpus(devices: Devices) -> Devices:
    if devices(2)[0].type != "cuda":
        pytest.skip("there is memory of GPUs only on GPUs")
    return devices
