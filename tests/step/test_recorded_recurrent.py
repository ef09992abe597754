"""Steps of recurrent layers are recorded, and train as on one device."""

from typing import Any

import pytest
import torch

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
