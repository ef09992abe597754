"""Buckets of any size give the same numbers."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from everygpu.errors import OptionError
from everygpu.parallel.buckets import (
    MIB,
    REPLICA_BYTES,
    replica_bucket_bytes,
    update_bucket_bytes,
)
from tests import tape

TINY = 1e-5
CPU = ["cpu"] * 2


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 6), torch.randn(6, 3)


def test_defaults_and_a_cap() -> None:
    small, large = [torch.empty(10)], [torch.empty(240 * MIB, device="meta")]
    assert replica_bucket_bytes(None) == REPLICA_BYTES == 25 * MIB
    assert replica_bucket_bytes(0.5) == MIB // 2
    assert update_bucket_bytes(small, None) == 12 * MIB
    assert update_bucket_bytes(large, None) == 20 * MIB
    assert update_bucket_bytes(large, 1) == MIB
    assert update_bucket_bytes(small, None, over_ranks=True) == REPLICA_BYTES
    assert replica_bucket_bytes(1e-9) == 1


@pytest.mark.parametrize("cap", [0, -1.0, float("nan"), float("inf"), True, "25"])
def test_what_is_no_size_is_refused(cap: Any) -> None:
    net = make_net()
    with pytest.raises(OptionError, match="DataParallel: bucket_cap_mb must be a finite number of MiB above 0"):
        everygpu.DataParallel(net, CPU, bucket_cap_mb=cap)
    with pytest.raises(OptionError, match="ShardedOptimizer: bucket_cap_mb must be"):
        everygpu.ShardedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), CPU, bucket_cap_mb=cap)


@pytest.mark.parametrize("engine", ["threads", "graphs"])
def test_data_parallel_with_a_bucket_for_each_parameter(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tape.install(monkeypatch, fused=True)
    plain = make_net()
    model = everygpu.DataParallel(copy.deepcopy(plain), CPU, engine=engine, bucket_cap_mb=TINY)
    for _ in range(6):
        x, y = batch()
        for net in (plain, model):
            net.zero_grad()
            F.mse_loss(net(x), y).backward()
        torch.testing.assert_close([p.grad for p in model.module.parameters()], [p.grad for p in plain.parameters()])
    recorder = getattr(model._engine, "recorder", None)
    groups = recorder.sync.groups if recorder else model._replicas._buckets  # type: ignore[union-attr]
    assert len(groups) == 4


@pytest.mark.parametrize("fused", [False, True])
def test_train_step_takes_its_buckets_from_the_model(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tape.install(monkeypatch, fused=fused)
    plain, ours = make_net(), make_net()
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in (plain, ours)]
    model = everygpu.DataParallel(ours, CPU, bucket_cap_mb=TINY)
    step = everygpu.TrainStep(model, F.mse_loss, optimizers[1])
    for _ in range(6):
        x, y = batch()
        optimizers[0].zero_grad()
        F.mse_loss(plain(x), y).backward()
        optimizers[0].step()
        step(x, y)
    assert len(step._strategy.flat_params.plans) == 4
    torch.testing.assert_close(list(ours.parameters()), list(plain.parameters()))


def test_sharded_optimizer_with_a_bucket_for_each_parameter() -> None:
    plain, ours = make_net(), make_net()
    stock = torch.optim.AdamW(plain.parameters(), lr=0.1)
    sharded = everygpu.ShardedOptimizer(torch.optim.AdamW(ours.parameters(), lr=0.1), CPU, bucket_cap_mb=TINY)
    for _ in range(3):
        x, y = batch()
        for net, optimizer in ((plain, stock), (ours, sharded)):
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
    assert len(sharded._shards._plans) == 4
    torch.testing.assert_close(list(ours.parameters()), list(plain.parameters()))
    assert copy.deepcopy(sharded).bucket_cap_mb == TINY
