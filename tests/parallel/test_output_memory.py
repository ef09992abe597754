"""Outputs have memory of their own: what is written to inputs, parameters and buffers afterwards doesn't reach them."""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everygpu

Devices = Callable[[int], list[torch.device]]

ROWS, WIDTH = 6, 2**17
MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Returning(nn.Module):
    """Returns inputs, parameters, buffers, views of these, and what it makes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, width))
        self.register_buffer("mean", torch.randn(2, width))
        self.kept = torch.randn(2, width)
        self.listed = [torch.randn(2, width)]

    def forward(self, x: Tensor, whole: Tensor, more: dict[str, Tensor]) -> list[Tensor]:
        found = [x, x[:, 1:], x.view(-1, 2, x.shape[1] // 2), whole, whole.t(), self.weight, self.weight[1:]]
        found += [
            self.mean,
            self.mean[:, ::2],
            self.kept,
            self.listed[0],
            self.kept[:1],
            more["x"],
            more["x"].detach(),
            more["x"].T,
        ]
        return [*found, x * 2, (x * 2)[:, 1:], self.weight * 2, x.detach()]


def check_outputs(used: list[torch.device], draw: random.Random) -> None:
    width = draw.choice([8, WIDTH])
    net = Returning(width).to(used[0])
    net.kept, net.listed = net.kept.to(used[0]), [t.to(used[0]) for t in net.listed]
    model = everygpu.DataParallel(net, used, engine="threads")
    x, other = (torch.randn(ROWS, width, device=used[0]) for _ in range(2))
    whole = torch.randn(3, width, device=used[0])
    kind = draw.choice(["plain", "leaf", "computed"])
    if kind == "leaf":
        x.requires_grad_()
    elif kind == "computed":
        x, whole = (torch.zeros_like(t).requires_grad_() + t for t in (x, whole))
    with MODES[draw.choice(list(MODES))]():
        outputs = model(x, everygpu.Replicated(whole), {"x": other})
    shards = [shard.detach() for output in outputs for shard in output.shards]  # not what is joined once and kept
    before = [shard.clone() for shard in shards]
    with torch.no_grad():
        for t in (x, other, whole, net.weight, net.mean, net.kept, *net.listed):
            t.detach().zero_()
    for i, (now, then) in enumerate(zip(shards, before)):
        assert torch.equal(now, then), f"output {i // 2}, {kind}, {width}"


@pytest.mark.parametrize("seed", range(12))
def test_later_writes_dont_reach_outputs(devices: Devices, seed: int) -> None:
    check_outputs(devices(2), random.Random(seed))


@pytest.mark.gpu
@pytest.mark.cards(2)
def test_later_writes_dont_reach_outputs_of_another_gpu(devices: Devices) -> None:
    for seed in range(20):
        check_outputs(devices(2)[::-1], random.Random(seed))


def test_an_in_place_sampler(devices: Devices) -> None:
    class Denoise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(0.9)

    model = everygpu.DataParallel(Denoise(), devices(2))
    x = torch.ones(6, 2**17, device=devices(2)[0])
    with torch.no_grad():
        y = model(x)
        x.zero_()
    assert (everygpu.parallel.gather(y) == 0.9).all()


def test_no_output_has_the_module_searched(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of many parameters that returns many large outputs."""
    used = devices(2)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    model = everygpu.DataParallel(Outputs(net).to(used[0]), used).eval()
    calls: list[Any] = []
    with torch.no_grad():
        model(torch.ones(8, 4, device=used[0]))
        real = nn.Module.named_parameters
        monkeypatch.setattr(nn.Module, "named_parameters", lambda *a, **k: calls.append(a) or real(*a, **k))
        outputs = model(torch.ones(8, 4, device=used[0]))
    assert len(outputs) == 24
    assert not calls


class Outputs(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.net(x)
        return [y.repeat(1, 2**16) + i for i in range(24)]
