"""TrainStep whose replicas are in helper processes trains as it does on one device."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everygpu
from tests.parallel.engines.processes.pool import HelperPool

BATCHES = [(torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))) for _ in range(4)]


@pytest.fixture(autouse=True)
def serving(helpers: HelperPool) -> Iterator[None]:
    with helpers.serving():
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        out = self.head(self.body(x))
        return out if target is None else nn.functional.cross_entropy(out, target)


def frozen_net() -> nn.Module:
    net = Net()
    net.body[0].requires_grad_(False)
    return net


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.05)


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


CROSS_ENTROPY = nn.CrossEntropyLoss()
SOME = nn.CrossEntropyLoss(ignore_index=2)
CASES = {
    "adamw": (Net, adamw, CROSS_ENTROPY, {}),
    "momentum": (Net, momentum, CROSS_ENTROPY, {}),
    "accumulate": (Net, adamw, CROSS_ENTROPY, {"accumulate": 2}),
    "clip": (Net, momentum, CROSS_ENTROPY, {"clip_norm": 0.1}),
    "ignore_index": (Net, adamw, SOME, {}),
    "frozen": (frozen_net, adamw, CROSS_ENTROPY, {}),
    "loss in the model": (Net, adamw, None, {}),
}


def train(name: str, devices: list[str], engine: str) -> tuple[list[float], dict[str, Tensor]]:
    make, optimize, loss, options = CASES[name]
    torch.manual_seed(0)
    net = make().double()
    model: Any = everygpu.DataParallel(net, devices, engine=engine)
    step = everygpu.TrainStep(model, loss, optimize(net), **options)
    losses = []
    for i, batch in enumerate(BATCHES):
        losses.append(float(step(*batch)))
        if i == 1:
            with torch.no_grad():
                net.head.weight.mul_(0.5)
    if len(devices) > 1:
        assert getattr(model._engine, "reason", None) is None, model._engine.reason
    return losses, {k: v.clone() for k, v in net.state_dict().items()}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name: str) -> None:
    ours, theirs = train(name, ["cpu"] * 2, "processes"), train(name, ["cpu"], "threads")
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
