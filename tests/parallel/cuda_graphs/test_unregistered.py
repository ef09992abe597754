"""Tensors that require gradients and are no parameters of the module: a replay would lose what they get."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everygpu
from tests.parallel.cuda_graphs.forwards import NUM_STEPS, Devices, make_batches, num_graphs


class Scaled(nn.Module):
    """Scales its outputs by something that isn't registered."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.kind = kind
        self.register_buffer("scale", torch.ones(3))
        if kind == "buffer":
            self.scale.requires_grad_()
        other = nn.Linear(3, 3)
        self.apply_other = lambda x: nn.functional.linear(x, other.weight.to(x.device), other.bias.to(x.device))
        self.holder = SimpleNamespace(scale=torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(x)
        if self.kind == "closure":
            return self.apply_other(y)
        return y * (self.scale if self.kind == "buffer" else self.holder.scale).to(x.device)

    def unregistered(self) -> Tensor:
        cell = self.apply_other.__closure__[0].cell_contents
        return {"buffer": self.scale, "closure": cell.weight, "object": self.holder.scale}[self.kind]


def grads_of(used: list[torch.device], kind: str, engine: str) -> tuple[everygpu.DataParallel, Tensor]:
    torch.manual_seed(0)
    with used[0]:
        net = Scaled(kind)
    model = everygpu.DataParallel(net, used, engine=engine)
    for i, (x, _) in enumerate(make_batches(NUM_STEPS + 1)):
        if kind == "object" and i == NUM_STEPS:
            net.holder.scale.requires_grad_()
        net.unregistered().grad = None
        model(x).square().sum().backward()
    found = net.unregistered().grad
    assert found is not None
    return model, found.clone()


# What is on one card is used on another: torch says so, once.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("kind", ["buffer", "closure"])
def test_what_is_not_registered_gets_its_gradient(capturing: Devices, caplog: Any, kind: str) -> None:
    used = capturing(2)
    _, wanted = grads_of(used, kind, "threads")
    with caplog.at_level(logging.WARNING, "everygpu"):
        model, found = grads_of(used, kind, "capture")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert num_graphs(model) == 0
    (line,) = caplog.messages
    assert ("buffer scale" if kind == "buffer" else "another of shape") in line


def test_a_tensor_that_comes_to_require_a_gradient_drops_captures(capturing: Devices) -> None:
    used = capturing(2)
    _, wanted = grads_of(used, "object", "threads")
    _, found = grads_of(used, "object", "capture")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_leaf_of_forward_itself_is_captured(capturing: Devices) -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))

        def forward(self, x: Tensor) -> Any:
            positions = x.detach().clone().requires_grad_()
            return torch.autograd.grad(self.energy(positions).sum(), positions, create_graph=True)[0]

    used = capturing(2)
    model = everygpu.DataParallel(Forces().to(used[0]), used, engine="capture")
    for x, _ in make_batches(NUM_STEPS):
        model(x).square().sum().backward()
    assert num_graphs(model) == 1
