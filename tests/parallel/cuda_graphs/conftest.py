"""How parameters and gradients travel in recordings."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests import tape

Devices = Callable[[int], list[torch.device]]


@pytest.fixture(params=["kernels", "copies"])
def either_way(request: pytest.FixtureRequest, devices: Devices, monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """``devices`` for recordings: GPUs, or CPU replicas, where CUDA graphs are acted out."""
    used, switch = devices(2), "everygpu.parallel.cuda_graphs.transfer.param_group.can_use_kernels"
    tape.prepare(used, monkeypatch, fused=request.param == "kernels", switch=switch)
    yield devices
    if used[0].type == "cuda":
        torch.cuda.synchronize()
