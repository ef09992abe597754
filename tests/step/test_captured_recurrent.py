"""Recurrent layers are captured, by ``TrainStep`` and in a plain loop, and train as on one device."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import everygpu
from tests.parallel.cuda_graphs.forwards import num_graphs as num_captured_forwards
from tests.parallel.cuda_graphs.recurrent import MODELS, LanguageModel, loss_of, make_tokens, train_one_device
from tests.step.scenarios import Devices
from tests.step.test_capture import num_graphs, once

# Where parameters are one after another, they lie in another order than cuDNN's.
pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights")
NUM_STEPS = 10
WAYS = ["step", "capture", "auto"]


def train(
    net: nn.Module, used: list[torch.device], way: str, num: int = NUM_STEPS, lengths: Sequence[int] = (4,)
) -> tuple[list[Tensor], int]:
    """Train, by ``TrainStep`` or by an engine; return the losses, and how many captures there are."""
    model = everygpu.DataParallel(net, used, engine="auto" if way == "step" else way)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if way == "step":
        step = everygpu.TrainStep(model, loss_of, optimizer)
        return [step(x, y).cpu() for x, y in make_tokens(num, lengths=lengths)], num_graphs(step)
    losses = []
    for x, y in make_tokens(num, lengths=lengths):
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return losses, num_captured_forwards(model)


def skip_if_never_captured(used: list[torch.device], way: str) -> None:
    if used[0].type == "cpu" and way == "auto":
        pytest.skip("replicas on the CPU aren't captured by default")


@once
@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "step") for name in MODELS), ("LSTM", "capture"), ("GRU", "capture"), ("LSTM", "auto"), ("RNN", "auto")],
)
def test_training_is_as_on_one_device(capturing: Devices, name: str, way: str) -> None:
    """Before a capture, weights may move in each forward; a proof leaves that out."""
    used = capturing(2)
    skip_if_never_captured(used, way)
    alone, net = MODELS[name]().to(used[0]), MODELS[name]().to(used[0])
    losses, num = train(net, used, way)
    assert num == 1
    torch.testing.assert_close(losses, train_one_device(alone, used[0], NUM_STEPS), rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    assert all(a is b for a, b in zip(net.cells._flat_weights, net.cells.parameters()))
    (x, _), *_ = make_tokens(1)
    with torch.no_grad():
        model = everygpu.DataParallel(net.eval(), used)
        torch.testing.assert_close(everygpu.parallel.gather(model(x)), net(x.to(used[0])), rtol=1e-4, atol=1e-5)
    assert torch.backends.cudnn.enabled


@once
@pytest.mark.parametrize("way", WAYS)
def test_dropout_and_batches_of_several_lengths(capturing: Devices, way: str) -> None:
    """cuDNN draws a seed for dropout after a generator's state was set, as a proof and each replay do."""
    used, lengths = capturing(2), (4, 3)
    skip_if_never_captured(used, way)
    net = LanguageModel(nn.LSTM, num_layers=2, dropout=0.5).to(used[0])
    losses, num = train(net, used, way, 2 * NUM_STEPS, lengths)
    assert num == len(lengths)
    assert sum(losses[-6:]) < sum(losses[:6])


@once
def test_a_weight_that_is_replaced(capturing: Devices) -> None:
    used = capturing(2)
    nets: list[Any] = []
    for engine in ("threads", "capture"):
        net = MODELS["GRU"]().to(used[0])
        train(net, used, engine)
        torch.manual_seed(1)
        net.cells.weight_ih_l0 = nn.Parameter(torch.randn(24, 8).to(used[0]))
        losses, num = train(net, used, engine)
        assert num == (engine == "capture")
        nets.append((losses, list(net.parameters())))
    torch.testing.assert_close(nets[1], nets[0], rtol=1e-3, atol=1e-4)


def put_in_one_storage(net: nn.Module) -> nn.Module:
    """Have parameters lie as cuDNN's weights do: in one storage, in another order than theirs."""
    params = list(net.parameters())
    flat = torch.zeros(sum(p.numel() + 3 for p in params), device=params[0].device)
    begin = 0
    for p in [*params[1::2], *params[::2]]:
        part = flat[begin : begin + p.numel()].view(p.shape)
        p.data = part.copy_(p.data)
        begin += p.numel() + 3
    return net


@pytest.mark.parametrize(("num", "kind"), [(1, torch.optim.AdamW), (2, torch.optim.SGD), (3, torch.optim.AdamW)])
def test_weights_in_one_storage(capturing: Devices, num: int, kind: Any) -> None:
    used = capturing(num)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Linear(7, 5))
    alone, net = copy.deepcopy(net).to(used[0]), put_in_one_storage(net.to(used[0]))
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), F.cross_entropy, kind(net.parameters(), lr=0.01))
    optimizer = kind(alone.parameters(), lr=0.01)
    for _ in range(NUM_STEPS):
        x, y = torch.randn(9, 6, device=used[0]), torch.randint(0, 5, (9,), device=used[0])
        step(x, y)
        optimizer.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
    assert num_graphs(step) == 1
    for ours, theirs in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
