"""Fixtures of the tests of DataParallel."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import everygpu
from everygpu.parallel.engines import table
from tests.parallel.oracle import Mlp, pair, rows


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``engine="auto"`` choose threads on GPUs, too; a file takes part by ``pytestmark``."""
    monkeypatch.setattr(table, "can_gain", lambda context: False)


@pytest.fixture
def quick_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Don't have the compiler measure for its log how long guards take: it empties the processor's caches first."""
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)


@pytest.fixture
def devs(devices: Callable[[int], list[torch.device]]) -> list[torch.device]:
    """Devices of three replicas."""
    return devices(3)


@pytest.fixture
def mlps(devs: list[torch.device]) -> tuple[everygpu.DataParallel, nn.Module]:
    """The same model twice: on three replicas, and bare on the first device."""
    return pair(Mlp, devs)


@pytest.fixture
def model(mlps: tuple[everygpu.DataParallel, nn.Module]) -> everygpu.DataParallel:
    return mlps[0]


@pytest.fixture
def bare(mlps: tuple[everygpu.DataParallel, nn.Module]) -> nn.Module:
    return mlps[1]


@pytest.fixture
def x(devs: list[torch.device]) -> Tensor:
    """Seven rows for ``model`` and ``bare``."""
    return rows(7, 3, device=devs[0])
