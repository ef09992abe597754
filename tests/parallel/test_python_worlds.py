"""What Python programs have around a model: enums, configurations, patched functions. Equal to one device."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu

NUM_STEPS = 5
Devices = Callable[[int], list[torch.device]]


class Activation(enum.Enum):
    RELU = "relu"
    TANH = "tanh"


class Width(enum.IntEnum):
    IN = 4
    OUT = 6


class WithEnums(nn.Module):
    """Chooses by enums, and changes one of them on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.table = Activation.RELU, {Activation.RELU: torch.relu, Activation.TANH: torch.tanh}
        self.first, self.last = nn.Linear(Width.IN, Width.OUT), nn.Linear(Width.OUT, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table[self.kind](self.first(x))
        return self.last(hidden) * (2.0 if self.kind is Activation.TANH else 1.0)

    def before_step(self, step: int) -> None:
        self.kind = Activation.TANH if step >= 2 else Activation.RELU


@dataclasses.dataclass(frozen=True)
class Inner:
    gain: float = 0.5
    kind: Activation = Activation.TANH


@dataclasses.dataclass
class Config:
    width: int = 6
    inner: Inner = dataclasses.field(default_factory=Inner)


class Configured(nn.Module):
    """Reads a configuration with an inner one, which the loop changes by a function."""

    def __init__(self, config: Any, change: Callable[[Any, float], object]) -> None:
        super().__init__()
        self.config, self._change = config, change
        self.first, self.last = nn.Linear(4, config.width), nn.Linear(config.width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.config.inner.gain)

    def before_step(self, step: int) -> None:
        self._change(self.config, 0.5 + step)


def with_dataclasses() -> nn.Module:
    return Configured(Config(), lambda config, gain: setattr(config, "inner", Inner(gain)))


def with_pydantic() -> nn.Module:
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", gain=(float, 0.5), kind=(Activation, Activation.TANH))
    config = pydantic.create_model("Config", width=(int, 6), inner=(inner, inner()))
    return Configured(config(), lambda config, gain: setattr(config.inner, "gain", gain))


def with_omegaconf() -> nn.Module:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"width": 6, "inner": {"gain": 0.5}})
    return Configured(config, lambda config, gain: setattr(config.inner, "gain", gain))


class Attention(nn.Module):
    """Calls what may be patched by its name in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 18), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x[:, None] * torch.ones(3, 1, dtype=x.dtype, device=x.device)).chunk(3, -1)
        return self.last(F.scaled_dot_product_attention(q, k, v).mean(1))


class ComputedBefore(nn.Module):
    """Reads an attribute that is computed from its own parameters before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.shape = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) + x @ self.scaled.T)

    def before_step(self, step: int) -> None:
        self.scaled = self.shape.square() + self.first.weight


def train(net: nn.Module, devices: list[torch.device], num_steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return losses, and the gradients of each step."""
    torch.manual_seed(0)
    net = net.double().to(devices[0])
    model = everygpu.DataParallel(net, devices) if len(devices) > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses, grads = [], []
    for step in range(num_steps):
        x, y = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
        getattr(net, "before_step", int)(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x.to(devices[0])), y.to(devices[0]))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
        grads += [p.grad.cpu().clone() for p in net.parameters() if p.grad is not None]
    return losses, grads


def check(make: Callable[[], nn.Module], used: list[torch.device], num_steps: int = NUM_STEPS) -> None:
    """Train on one device and on several, and compare."""
    torch.manual_seed(1)
    alone, net = make(), make()
    net.load_state_dict(alone.state_dict())
    wanted, found = train(alone, used[:1], num_steps), train(net, used, num_steps)
    assert len(wanted[1]) == num_steps * len(list(alone.parameters()))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "make", [WithEnums, with_dataclasses, with_pydantic, with_omegaconf, Attention, ComputedBefore]
)
def test_trains_as_one_device(devices: Devices, make: Callable[[], nn.Module]) -> None:
    check(make, devices(2))


def test_patched_functions_and_forwards_run_in_every_replica(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, linear, rows = F.scaled_dot_product_attention, nn.Linear.forward, []

    def changed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows.append(len(q))
        return attention(q, k, v) * 3.0 + q

    check(Attention, devices(2))
    monkeypatch.setattr(F, "scaled_dot_product_attention", changed)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: linear(self, x) * 1.5 + 0.25)
    check(Attention, devices(2))
    assert sorted(rows) == sorted([7, 4, 3] * NUM_STEPS)
