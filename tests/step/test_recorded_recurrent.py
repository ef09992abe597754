"""Steps of recurrent layers are recorded, and train as on one device."""

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import everygpu
from tests.parallel.cuda_graphs.recurrent import MODELS, LanguageModel, loss_of, make_tokens, train_one_device
from tests.step.scenarios import Devices
from tests.step.test_capture import num_recordings

# Where parameters are one after another, they lie in another order than cuDNN's.
pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights")
NUM_STEPS = 12


@pytest.mark.parametrize("capture", ["auto", True])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_as_on_one_device(recording: Devices, name: str, capture: Any) -> None:
    used = recording(2)
    alone, net = MODELS[name]().to(used[0]), MODELS[name]().to(used[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), loss_of, optimizer, capture=capture)
    losses = [step(x, y).cpu() for x, y in make_tokens(NUM_STEPS)]
    expected = train_one_device(alone, used[0], NUM_STEPS)
    assert num_recordings(step) == 1
    assert step._capture is not None
    assert step._capture._num_launches > NUM_STEPS // 2
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    assert all(a is b for a, b in zip(net.cells._flat_weights, net.cells.parameters()))


def test_batches_of_several_lengths(recording: Devices) -> None:
    used, lengths = recording(2), (6, 4, 8)
    alone, net = MODELS["LSTM"]().to(used[0]), MODELS["LSTM"]().to(used[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), loss_of, optimizer)
    losses = [step(x, y).cpu() for x, y in make_tokens(3 * NUM_STEPS, lengths=lengths)]
    assert num_recordings(step) == len(lengths)
    torch.testing.assert_close(losses, train_one_device(alone, used[0], 3 * NUM_STEPS, lengths), rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_dropout_between_layers(recording: Devices) -> None:
    used, lengths = recording(2), (6, 4, 8)
    net = LanguageModel(torch.nn.LSTM, num_layers=2, dropout=0.5).to(used[0])
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), loss_of, torch.optim.SGD(net.parameters(), lr=0.1))
    losses = [step(x, y).cpu() for x, y in make_tokens(3 * NUM_STEPS, lengths=lengths)]
    assert num_recordings(step) == len(lengths)
    assert sum(losses[-9:]) < sum(losses[:9])


def put_in_one_storage(net: torch.nn.Module) -> torch.nn.Module:
    """Have parameters lie as cuDNN's weights do: in one storage, in another order than theirs."""
    params = list(net.parameters())
    flat = torch.zeros(sum(p.numel() + 3 for p in params), device=params[0].device)
    begin = 0
    for p in [*params[1::2], *params[::2]]:
        part = flat[begin : begin + p.numel()].view(p.shape)
        p.data = part.copy_(p.data)
        begin += p.numel() + 3
    return net


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_weights_in_one_storage(recording: Devices, num: int, kind: Any) -> None:
    used = recording(num)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 7), torch.nn.Linear(7, 5))
    alone, net = copy.deepcopy(net).to(used[0]), put_in_one_storage(net.to(used[0]))
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), F.cross_entropy, kind(net.parameters(), lr=0.01))
    optimizer = kind(alone.parameters(), lr=0.01)
    for _ in range(NUM_STEPS):
        x, y = torch.randn(9, 6, device=used[0]), torch.randint(0, 5, (9,), device=used[0])
        step(x, y)
        optimizer.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
    assert num_recordings(step) == 1
    for ours, theirs in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
