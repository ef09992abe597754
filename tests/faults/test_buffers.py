"""Running statistics that a forward writes, where the loss of a batch is not finite."""

import copy

import pytest
import torch
from torch import nn

import everygpu
from everygpu.errors import NonFiniteError
from tests import tape

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (8,), generator=torch.Generator().manual_seed(1))


class Normed(nn.Module):
    """A loss with statistics of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.norm(x), y)


def make(used, *, in_loss=False, **options):
    torch.manual_seed(0)
    norm = nn.Identity() if in_loss else nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=0.5))
    net, loss = nn.Sequential(norm, nn.Linear(4, 3)).to(used[0]), Normed().to(used[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    criterion = loss if in_loss else nn.CrossEntropyLoss()
    return everygpu.TrainStep(everygpu.DataParallel(net, used), criterion, optimizer, **options)


def buffers(step):
    owners = [step.model.module, *([step.loss] if isinstance(step.loss, nn.Module) else [])]
    return copy.deepcopy([b for owner in owners for b in owner.buffers() if b.is_floating_point()])


def spoilt():
    x = X.clone()
    x[1, 0] = float("nan")
    return x


def check_put_back(step, num_steps):
    for _ in range(num_steps):
        step(X, Y)
    before = buffers(step)
    step(spoilt(), Y)
    assert step.stats().num_skipped == 1
    torch.testing.assert_close(buffers(step), before, rtol=0, atol=0)
    step(X, Y)
    assert step.stats().num_skipped == 1
    assert not torch.equal(buffers(step)[0], before[0]), "they go on"


@pytest.mark.parametrize("in_loss", [False, True], ids=["model", "loss"])
def test_statistics_are_as_before(devices, in_loss):
    check_put_back(make(devices(2), in_loss=in_loss), 1)


def test_statistics_of_a_module_that_the_loss_refers_to(devices):
    step = make(devices(1), in_loss=True)
    module = step.loss
    step.loss = lambda output, target: module(output, target)
    for x in (X, spoilt()):
        step(x, Y)
    assert module.norm.running_mean.isfinite().all()


def test_statistics_when_it_raises(devices):
    step = make(devices(2), on_nonfinite="raise", capture=False)
    step(X, Y)
    before = buffers(step)
    with pytest.raises(NonFiniteError):
        any(step(spoilt(), Y) is None for _ in range(10))
    torch.testing.assert_close(buffers(step), before, rtol=0, atol=0)


@pytest.mark.parametrize("in_loss", [False, True], ids=["model", "loss"])
def test_statistics_in_captured_steps(devices, monkeypatch, in_loss):
    used = devices(2)
    tape.prepare(used, monkeypatch, fused=True)
    step = make(used, in_loss=in_loss)
    check_put_back(step, 8)
    assert step.stats().engine == "capture"
