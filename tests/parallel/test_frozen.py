"""Within ``frozen`` the module is sent once; outside, and where gradients are recorded, at every forward."""

import copy
import gc

import pytest
import torch
from torch import nn

import everygpu
from everygpu import comm

pytestmark = pytest.mark.usefixtures("in_threads")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return self.linear(x) + self.shift


@pytest.fixture
def sent(monkeypatch):
    """How often buffers were sent."""
    counts = []
    original = comm.broadcast

    def counting(source, targets):
        counts.append(len(targets))
        original(source, targets)

    monkeypatch.setattr(comm, "broadcast", counting)
    return counts


def run(model, x):
    return everygpu.gather(model(x))


def test_sent_once(devices, sent):
    used = devices(3)
    net = Net().to(used[0])
    model, x = everygpu.DataParallel(net, used), torch.randn(9, 3, device=used[0])
    with model.frozen(), torch.no_grad():
        first = run(model, x)
        before = len(sent)
        assert all(run(model, x).equal(first) for _ in range(3))
        assert len(sent) == before > 0
    torch.testing.assert_close(first, net(x))
    with torch.no_grad():
        run(model, x)
    assert len(sent) > before


def test_changes_are_seen_again_afterwards(devices):
    used = devices(2)
    net = Net().to(used[0])
    model, x = everygpu.DataParallel(net, used), torch.randn(6, 3, device=used[0])
    for scale in (1.0, 3.0):
        net.linear.weight.data.mul_(scale)
        with model.frozen(), torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(run(model, x), net(x))


def test_more_replicas_than_at_first(devices):
    used = devices(3)
    net = Net().to(used[0])
    model, x = everygpu.DataParallel(net, used), torch.randn(9, 3, device=used[0])
    with model.frozen(), torch.no_grad():
        for rows in (1, 9, 2, 9):
            torch.testing.assert_close(run(model, x[:rows]), net(x[:rows]))


def test_gradients_are_as_ever(devices):
    used = devices(2)
    net = Net().to(used[0])
    plain = copy.deepcopy(net)
    model, x = everygpu.DataParallel(net, used), torch.randn(6, 3, device=used[0])
    with model.frozen():
        with torch.no_grad():
            run(model, x)
        for _ in range(2):
            model(x).square().sum().backward()
            plain(x).square().sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(run(model, x), net(x))
    torch.testing.assert_close(net.linear.weight.grad, plain.linear.weight.grad)


def test_nested_and_left_by_an_exception(devices, sent):
    used = devices(2)
    model, x = everygpu.DataParallel(Net().to(used[0]), used), torch.randn(6, 3, device=used[0])
    with torch.no_grad():
        with model.frozen():
            run(model, x)
            with model.frozen():
                run(model, x)
            before = len(sent)
            run(model, x)
            assert len(sent) == before
        with pytest.raises(KeyError), model.frozen():
            raise KeyError
        run(model, x)
        run(model, x)
    assert len(sent) > before + 1


def test_a_new_module_within(devices):
    used = devices(2)
    model, x = everygpu.DataParallel(Net().to(used[0]), used), torch.randn(6, 3, device=used[0])
    with model.frozen(), torch.no_grad():
        run(model, x)
        model.module = Net().to(used[0])
        model.module.linear.weight.data.zero_()
        torch.testing.assert_close(run(model, x), model.module(x))


def test_copies_are_not_frozen():
    model = everygpu.DataParallel(Net(), ["cpu"] * 2)
    with model.frozen(), torch.no_grad():
        run(model, torch.randn(4, 3))
        copied = copy.deepcopy(model)
    assert copied._fresh is None
    gc.collect()
    assert run(copied, torch.randn(4, 3)).shape == (4, 4)


def test_one_device():
    model = everygpu.DataParallel(Net(), ["cpu"])
    with model.frozen():
        assert model(torch.randn(4, 3)).shape == (4, 4)
