"""Replicas of a capture see the parameters of the step, whatever the forward does with them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from tests.parallel.cuda_graphs.forwards import NUM_STEPS, Devices
from tests.parallel.cuda_graphs.recurrent import loss_of, make_tokens

TINY = 1e-9
"""A group for each parameter."""


class Net(nn.Module):
    """Of parameters that are used in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))
        self.scale.note = "scale"  # type: ignore[attr-defined]
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Any:
        assert isinstance(self.scale, nn.Parameter)
        assert self.scale.note == "scale"  # type: ignore[attr-defined]
        h = self.embedding(ids)
        for layer in self.layers:
            h = h + layer(h).tanh() * self.scale
        mixed, _ = self.attention(h, h, h)
        with torch.no_grad():
            size = self.layers[0].weight.abs().mean()  # no other weight is asked for
        h = self.norm(h + mixed) / size
        h = h + copy.deepcopy(self.layers[1])(h).detach()
        penalty = sum(p.square().mean() for p in self.parameters())
        return F.linear(h, self.embedding.weight) + penalty


class Writing(Net):
    """Writes to a parameter."""

    def forward(self, ids: Tensor) -> Any:
        with torch.no_grad():
            self.scale.mul_(0.9)
        return super().forward(ids)


class WritingUncounted(Net):
    """Writes to a parameter in a way that torch doesn't count."""

    def forward(self, ids: Tensor) -> Any:
        self.scale.data.mul_(0.9)
        return super().forward(ids)


def train(make: Callable[[], nn.Module], used: list[torch.device], engine: str) -> tuple[Any, list[Tensor]]:
    """Train to tell each token's next; return the model, and the losses."""
    torch.manual_seed(0)
    net = make().to(used[0])
    model = everygpu.DataParallel(net, used, engine=engine, bucket_cap_mb=TINY)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for ids, following in make_tokens(NUM_STEPS):
        loss = loss_of(model(ids), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return model, losses


def compare(ours: tuple[Any, list[Tensor]], plain: tuple[Any, list[Tensor]]) -> None:
    torch.testing.assert_close(ours[1], plain[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[0].state_dict(), plain[0].state_dict(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [Net, Writing, WritingUncounted])
def test_parameters_are_those_of_the_step(capturing: Devices, make: Any) -> None:
    used = capturing(2)
    plain, ours = train(make, used, "threads"), train(make, used, "capture")
    compare(ours, plain)
    assert len(ours[0]._engine.captured_forward.capture._graphs) == 1


def test_rows_that_are_written_as_they_are_looked_up(capturing: Devices) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(40, 8, max_norm=0.5), nn.Linear(8, 12))

    used = capturing(2)
    compare(train(make, used, "capture"), train(make, used, "threads"))


def test_an_optimizer_of_what_is_frozen_in_the_forward(capturing: Devices) -> None:
    """As a discriminator in a generator's step: torch counts no write of a fused optimizer's."""

    def train_both(engine: str) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(capturing(2)[0])
        net[1].requires_grad_(False)
        model = everygpu.DataParallel(net, capturing(2), engine=engine)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, fused=True) for m in net]
        x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).to(capturing(2)[0])
        losses = []
        for _ in range(NUM_STEPS + 2):
            loss = model(x).square().mean()
            loss.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            for p in net[1].parameters():
                p.grad = torch.ones_like(p)
            optimizers[1].step()
            optimizers[1].zero_grad()
            losses.append(loss.detach().cpu())
        return model, losses

    ours = train_both("capture")
    compare(ours, train_both("threads"))
    assert ours[0].engine_in_use == "capture"
