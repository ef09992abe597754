"""Snapshots: what training does next must not reach them, on the CPU and on a GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from everygpu.checkpoint.background import SnapshotMemory, StateSnapshot

on_each_kind = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    memory = SnapshotMemory()
    yield memory
    memory.release()


def taken(**tensors: Tensor) -> StateSnapshot:
    return StateSnapshot(document={}, files={"model": tensors})


@on_each_kind
def test_it_holds_the_values_from_before_what_is_launched_next(memory: SnapshotMemory, device: str) -> None:
    big = torch.arange(2**24, dtype=torch.float32, device=device)  # 64 MiB: a copy that is not over at once
    views = {"strided": big[::4096], "half": big[:1000].half(), "scalar": big[7], "empty": big[:0]}
    expected = {"big": big.clone(), **{name: view.clone() for name, view in views.items()}}
    for _ in range(3):  # the second and the third time into the memory of the first
        arrived = memory.copy(taken(big=big, tied=big, **views))
        big.zero_()
        found = arrived().files["model"]
        for name, value in expected.items():
            assert found[name].device.type == "cpu"
            assert torch.equal(found[name], value.cpu()), name
        assert found["tied"] is found["big"]
        big.copy_(expected["big"])


@on_each_kind
def test_only_memory_for_gpus_is_pinned_and_it_is_given_back(memory: SnapshotMemory, device: str) -> None:
    memory.copy(taken(x=torch.ones(1000, device=device)))()
    first = memory._memory
    assert first.is_pinned() == (device == "cuda")
    memory.copy(taken(x=torch.ones(500, device=device)))()
    assert memory._memory is first
    memory.copy(taken(x=torch.ones(100_000, device=device)))()
    assert memory._memory.numel() >= 400_000
    memory.release()
    assert memory._memory.numel() == 0


@pytest.mark.gpu
def test_memory_for_the_cpu_is_pinned_when_a_gpu_comes(memory: SnapshotMemory) -> None:
    memory.copy(taken(x=torch.ones(1000)))()
    assert not memory._memory.is_pinned()
    memory.copy(taken(x=torch.ones(500, device="cuda"), y=torch.zeros(3)))()
    assert memory._memory.is_pinned()
