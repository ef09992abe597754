"""How parameters and gradients travel in recordings."""

import gc
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


BOTH_WAYS_ON_GPUS = {"test_training_is_the_same", "test_with_options"}


@pytest.fixture
def recording(either_way: Devices, request: pytest.FixtureRequest) -> Iterator[Devices]:
    """``devices`` on which forwards are recorded; on GPUs most tests go one way, the CPU's are enough for the other."""
    by_copies = request.node.callspec.params["either_way"] == "copies"
    if either_way(2)[0].type == "cuda":
        if by_copies and request.node.originalname not in BOTH_WAYS_ON_GPUS:
            pytest.skip("the CPU's are enough")
        torch.cuda.manual_seed_all(0)
    yield either_way
    gc.collect()  # exceptions that were expected hold models, which hold threads
