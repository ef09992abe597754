"""Where a loss can't be captured, the model's forward and backward are, on the step's own replicas."""

import logging
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from tests.step.conftest import Devices


class Net(nn.Module):
    """Has a parameter that takes part at times, statistics and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.rare = nn.Linear(8, 8)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        x = F.dropout(self.norm(self.first(x)).tanh(), 0.25)
        return self.last(self.rare(x) if rare else x)


def on_host(output: Tensor, y: Tensor) -> Tensor:
    """Reads numbers back, as a CTC loss reads lengths."""
    return F.cross_entropy(output, y) * (1.0 if y.max().item() > 2 else 0.5)


class Centers(nn.Module):
    """Has parameters of its own, and uses one of the model's."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.ones(5))
        self.net = [net]

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return on_host(output * self.centers, y) + 0.1 * self.net[0].last.weight.square().mean()


def train(used: list[torch.device], capture: Any, num_steps: int = 24, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    net = Net().to(used[0])
    loss = Centers(net).to(used[0]) if options.pop("has_params", False) else on_host
    params = [*net.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())]
    optimizer = options.pop("optimizer", torch.optim.AdamW)(params, lr=0.01)
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), loss, optimizer, capture=capture, **options)
    data = torch.Generator().manual_seed(1)
    losses, engines = [], []
    for i in range(num_steps):
        x, y = torch.randn(8, 6, generator=data), torch.randint(0, 5, (8,), generator=data)
        if i == 18:
            x[0, 0] = math.inf
        if i == 20:
            with torch.no_grad():
                net.first.weight.mul_(0.5)
        losses.append(step(x.to(used[0]), y.to(used[0]), **({"rare": True} if i % 4 == 3 else {})).item())
        engines.append(step.stats().engine)
    return step, losses, net.state_dict(), engines


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2},
        {"clip_norm": 0.1},
        {"has_params": True},
        {"optimizer": torch.optim.SGD, "on_nonfinite": "ignore", "num_steps": 18},
        {"precision": "bf16"},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_equals_a_step_that_is_not_captured(capturing: Devices, count: int, options: dict[str, Any]) -> None:
    used = capturing(count)
    _, expected, weights, _ = train(used, False, **options)
    step, losses, ours, engines = train(used, "auto", **options)
    assert engines[17] == engines[-1] == "capture", engines
    assert step._strategy.is_spread
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    for name, value in ours.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6, msg=name)


class Chooses(Net):
    """Reads numbers back itself."""

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        return super().forward(x, x.sum().item() > 1e6)


class Keeps(Net):
    """Has a tensor that isn't registered, which each replica has a copy of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = [torch.ones(1)]

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        return super().forward(x) * self.scale[0].to(x.device)


@pytest.mark.parametrize("make", [Chooses, Keeps])
def test_a_model_that_cannot_be_captured_either_is_the_plain_loop(
    capturing: Devices, caplog: pytest.LogCaptureFixture, make: type[Net]
) -> None:
    caplog.set_level(logging.INFO, logger="everygpu")
    used = capturing(2)
    torch.manual_seed(0)
    net = make().to(used[0])
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), on_host, torch.optim.AdamW(net.parameters()))
    x, y = torch.randn(8, 6, device=used[0]), torch.randint(0, 5, (8,), device=used[0])
    for _ in range(12):
        step(x, y)
    assert not step._strategy.is_spread
    assert step.stats().engine != "capture"
    assert caplog.text.count("TrainStep: steps run without CUDA graphs") == 1
