"""``engine="graphs"``: recurrent layers are recorded, and train as on one device."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import everygpu
from tests.parallel.cuda_graphs.forwards import NUM_STEPS, Devices, num_recordings
from tests.parallel.cuda_graphs.recurrent import MODELS, LanguageModel, loss_of, make_tokens, train_one_device

# On GPUs a replica's weights lie in another order than cuDNN's.
pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights")


def train(model: everygpu.DataParallel, num: int, lengths: Sequence[int] = (6,)) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in make_tokens(num, lengths=lengths):
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_training_is_as_on_one_device(recording: Devices, name: str) -> None:
    used = recording(2)
    alone, net = MODELS[name]().to(used[0]), MODELS[name]().to(used[0])
    model = everygpu.DataParallel(net, used, engine="graphs")
    expected = train_one_device(alone, used[0], 2 * NUM_STEPS)
    losses = train(model, 2 * NUM_STEPS)
    assert num_recordings(model) == 1
    capture: Any = model._engine.recorder.capture
    assert capture._num_launches > NUM_STEPS
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_by_default(recording: Devices) -> None:
    """Before a recording, weights move in each forward; the proof leaves that out."""
    used = recording(2)
    if used[0].type == "cpu":
        pytest.skip("replicas on the CPU aren't recorded by default")
    alone, net = MODELS["LSTM"]().to(used[0]), MODELS["LSTM"]().to(used[0])
    model = everygpu.DataParallel(net, used)
    losses = train(model, 2 * NUM_STEPS)
    assert model.engine_in_use == "graphs"
    torch.testing.assert_close(losses, train_one_device(alone, used[0], 2 * NUM_STEPS), rtol=1e-3, atol=1e-4)
    assert torch.backends.cudnn.enabled


@pytest.mark.parametrize("engine", ["auto", "graphs"])
def test_dropout_between_layers(recording: Devices, engine: str) -> None:
    """cuDNN draws a seed for it after a generator's state was set, as a proof and each launch do."""
    used, lengths = recording(2), (6, 4, 8)
    if used[0].type == "cpu" and engine == "auto":
        pytest.skip("replicas on the CPU aren't recorded by default")
    net = LanguageModel(torch.nn.LSTM, num_layers=2, dropout=0.5).to(used[0])
    model = everygpu.DataParallel(net, used, engine=engine)
    losses = train(model, len(lengths) * 2 * NUM_STEPS, lengths)
    assert model.engine_in_use == "graphs"
    assert sum(losses[-9:]) < sum(losses[:9])


def test_layers_compute_with_their_own_weights_between_launches(recording: Devices) -> None:
    used = recording(2)
    net = MODELS["LSTM"]().to(used[0])
    model = everygpu.DataParallel(net, used, engine="graphs")
    train(model, NUM_STEPS)
    assert num_recordings(model) == 1
    assert all(a is b for a, b in zip(net.cells._flat_weights, net.cells.parameters()))
    (x, _), *_ = make_tokens(1)
    net.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), net(x.to(used[0])), rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_replaced(recording: Devices) -> None:
    used = recording(2)
    nets = []
    for engine in ("threads", "graphs"):
        net = MODELS["GRU"]().to(used[0])
        model = everygpu.DataParallel(net, used, engine=engine)
        train(model, NUM_STEPS)
        torch.manual_seed(1)
        net.cells.weight_ih_l0 = torch.nn.Parameter(torch.randn(24, 8).to(used[0]))
        losses = train(model, NUM_STEPS)
        assert num_recordings(model) == (engine == "graphs")
        nets.append((losses, list(net.parameters())))
    torch.testing.assert_close(nets[1], nets[0], rtol=1e-3, atol=1e-4)
