"""Rules say of each optimizer what torch's own step does."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import everygpu
from everygpu.step import fused
from everygpu.step.rules.table import RULES, find_rule
from everygpu.step.shards import ELEMENTWISE
from tests import tape

STEPS = {
    "Adam": {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
    "AdamW": {"lr": 0.1, "betas": (0.8, 0.9)},
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
}
KINDS = [kind for rule in RULES for kind in rule.optimizers]


def test_every_optimizer_has_one_rule_and_can_be_sharded() -> None:
    assert len(set(KINDS)) == len(KINDS)
    assert {kind.__name__ for kind in KINDS} == set(STEPS)
    assert set(KINDS) <= set(ELEMENTWISE)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_columns(kind: Any) -> None:
    rule = find_rule(kind([torch.zeros(1)]))
    assert rule is not None
    for maximize in (False, True):
        group = kind([torch.zeros(1)], maximize=maximize).param_groups[0]
        row = dict(zip(rule.columns, rule.make_row(group, 3), strict=True))
        assert row["sign"] == (-1 if maximize else 1)


def test_a_subclass_has_no_rule() -> None:
    class Mine(torch.optim.SGD):
        pass

    assert find_rule(Mine([torch.zeros(1)])) is None


@pytest.mark.parametrize("kind", KINDS)
def test_fused_updates_are_torchs(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tape.install(monkeypatch, fused=True)
    ran: list[int] = []
    run = fused.FusedUpdate.run
    monkeypatch.setattr(fused.FusedUpdate, "run", lambda *args, **kwargs: (ran.append(1), run(*args, **kwargs))[1])
    torch.manual_seed(0)
    ours, plain = nn.Linear(5, 3), nn.Linear(5, 3)
    plain.load_state_dict(ours.state_dict())
    optimizers = [kind(net.parameters(), **STEPS[kind.__name__]) for net in (ours, plain)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
    step = everygpu.TrainStep(everygpu.DataParallel(ours, ["cpu"] * 2), F.mse_loss, optimizers[0], capture=False)
    for i in range(5):
        x, y = torch.randn(6, 5), torch.randn(6, 3)
        step(x, y)
        optimizers[1].zero_grad()
        F.mse_loss(plain(x), y).backward()
        optimizers[1].step()
        for s in schedulers:
            s.step()
        if i == 2:
            optimizers[0].load_state_dict(optimizers[0].state_dict())
    assert len(ran) == 5
    torch.testing.assert_close(list(ours.parameters()), list(plain.parameters()))
    found, expected = (o.state_dict()["state"] for o in optimizers)
    torch.testing.assert_close(found, expected)


def test_a_momentum_that_torch_keeps_wider_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tape.install(monkeypatch, fused=True)
    net = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), **STEPS["SGD"])
    net(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    net.bfloat16()
    step = everygpu.TrainStep(everygpu.DataParallel(net, ["cpu"] * 2), F.mse_loss, optimizer, capture=False)
    step(torch.ones(4, 5, dtype=torch.bfloat16), torch.ones(4, 3, dtype=torch.bfloat16))
    kept = optimizer.state_dict()["state"][0]
    assert kept[find_rule(optimizer).states[0]].dtype is torch.float32  # type: ignore[union-attr]
