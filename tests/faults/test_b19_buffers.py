"""b19: buffers that a forward writes, where the loss of a batch is not finite."""

import copy

import pytest
import torch
from torch import nn

import everygpu
from everygpu.errors import NonFiniteError
from tests import tape

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (8,), generator=torch.Generator().manual_seed(1))


def in_place(module, mean):
    module.center.lerp_(mean, 0.1)


def through_data(module, mean):
    module.center.data.mul_(0.9).add_(mean, alpha=0.1)


def by_another(module, mean):
    module.center = module.center * 0.9 + mean * 0.1


WRITES = {f.__name__: f for f in (in_place, through_data, by_another)}


class Centered(nn.Module):
    """Takes a running mean of its input away, as DINO's center is, and counts the batches in a float."""

    def __init__(self, size, write, then=None):
        super().__init__()
        self.write, self.then = write, then
        self.register_buffer("center", torch.zeros(size))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(size))

    def forward(self, x, *targets):
        with torch.no_grad():
            self.write(self, x.detach().mean(0))
            self.count += 1
        x = (x - self.center) * self.scale
        return x if self.then is None else self.then(x, *targets)


def make(used, write, *, in_loss=False, **options):
    torch.manual_seed(0)
    net = nn.Linear(4, 3) if in_loss else nn.Sequential(Centered(4, write), nn.Linear(4, 3))
    loss = Centered(3, write, nn.CrossEntropyLoss()) if in_loss else nn.CrossEntropyLoss()
    net.to(used[0])
    loss.to(used[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return everygpu.TrainStep(everygpu.DataParallel(net, used), loss, optimizer, **options)


def buffers(step):
    return copy.deepcopy([*step.model.module.buffers(), *step.loss.buffers()])


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
@pytest.mark.parametrize("write", WRITES)
def test_b19_buffers_are_as_before(devices, write, in_loss):
    check_put_back(make(devices(2), WRITES[write], in_loss=in_loss), 1)


def test_b19_buffers_of_a_module_that_the_loss_refers_to(devices):
    used = devices(1)
    step = make(used, in_place, in_loss=True)
    module = step.loss
    step.loss = lambda output, target: module(output, target)
    for x in (X, spoilt()):
        step(x, Y)
    assert module.count == 1
    assert module.center.isfinite().all()


def test_b19_buffers_when_it_raises(devices):
    used = devices(2)
    step = make(used, in_place, on_nonfinite="raise", capture=False)
    step(X, Y)
    before = buffers(step)
    with pytest.raises(NonFiniteError):
        any(step(spoilt(), Y) is None for _ in range(10))
    torch.testing.assert_close(buffers(step), before, rtol=0, atol=0)


def test_b19_another_tensor_in_place_of_a_buffer_is_not_written(devices):
    def take_input(module, mean):
        module.center = mean

    kept = []
    step = make(devices(1), lambda module, mean: (take_input(module, mean), kept.append(mean)), capture=False)
    step(spoilt(), Y)
    assert kept[0].isnan().any()
    assert not buffers(step)[0].isnan().any()


@pytest.mark.parametrize("value", ["expanded", "large", "integer", "eval"])
def test_b19_what_is_not_kept(devices, monkeypatch, value):
    monkeypatch.setattr("everygpu.step.kept_buffers.MAX_BYTES", 100)
    used = devices(1)
    step = make(used, lambda *_: None, capture=False)
    module = step.model.module[0]
    tensors = {
        "expanded": torch.zeros(1).expand(4),
        "large": torch.zeros(26),
        "integer": torch.zeros(4, dtype=torch.int64),
        "eval": torch.zeros(4),
    }
    module.register_buffer("other", tensors[value].to(used[0]))
    if value != "expanded":
        module.write = lambda module, _: module.other.add_(1)
    if value == "eval":
        module.eval()
    step(spoilt(), Y)
    assert module.other[0] == (value != "expanded")


@pytest.mark.parametrize("write", [in_place, through_data])
@pytest.mark.parametrize("in_loss", [False, True], ids=["model", "loss"])
def test_b19_buffers_in_recorded_steps(devices, monkeypatch, write, in_loss):
    used = devices(2)
    tape.prepare(used, monkeypatch, fused=True, switch="everygpu.step.fused.can_fuse")
    step = make(used, write, in_loss=in_loss)
    check_put_back(step, 8)
    assert step.stats().engine == "graphs"
