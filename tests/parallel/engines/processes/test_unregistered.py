"""Tensors that require gradients and are no parameters: what a helper computes for them would stay there."""

import functools
import types

import pytest
import torch
from torch import nn

from everygpu import comm
from everygpu.comm import staged
from everygpu.parallel.engines.processes.direct import is_direct
from everygpu.parallel.engines.processes.module_receiver import ModuleReceiver
from everygpu.parallel.engines.processes.module_sender import ModuleSender
from everygpu.parallel.engines.processes.packing import CannotTravelError
from everygpu.parallel.engines.processes.shared_tensors import Exporter, Importer

CPU = torch.device("cpu")
SHIFT, HEAD = torch.ones(2), nn.Identity()


@pytest.fixture
def outside(monkeypatch):
    """Global variables of this test alone, as what is sent is moved to shared memory."""
    monkeypatch.setitem(globals(), "SHIFT", torch.ones(2))
    monkeypatch.setitem(globals(), "HEAD", nn.Linear(2, 2).requires_grad_(False))


class Layer(nn.Linear):
    def forward(self, x):
        return HEAD(super().forward(x)) + SHIFT


class Send:
    """Sends a module, as at each call."""

    def __init__(self, module):
        self.sender, self.told = ModuleSender(module, Exporter(CPU)), {}

    def __call__(self):
        tensors = self.sender.tensors()
        self.sender.update(tensors)
        return self.sender.update_globals(tensors, self.told)[0]


def make_leaf():
    return torch.ones(2, requires_grad=True)


def make_default():
    leaf = make_leaf()
    return lambda x, scale=leaf: x * scale


@pytest.mark.parametrize(
    "make",
    [
        make_leaf,
        lambda: comm.copy(make_leaf().view_as(make_leaf()), CPU, fresh=True),
        lambda: staged.copy(make_leaf(), CPU),
        lambda: [nn.Linear(2, 2)],
        lambda: {"a": [make_leaf()]},
        lambda: types.SimpleNamespace(scale=make_leaf()),
        lambda: functools.partial(torch.mul, make_leaf()),
        make_default,
    ],
)
def test_an_attribute_is_refused_by_name(make):
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].extra = make()
    with pytest.raises(CannotTravelError, match=r"attribute 0\.extra .* requires a gradient.*register it"):
        Send(module)()


def test_variables_that_come_to_require_gradients_are_refused_by_name(outside):
    send = Send(Layer(2, 2))
    send()
    send()  # what was sent has moved
    assert send() is None
    HEAD.requires_grad_()
    with pytest.raises(CannotTravelError, match=rf"global variable {__name__}\.HEAD .* requires a gradient"):
        send()
    HEAD.requires_grad_(False)
    SHIFT.requires_grad_()
    with pytest.raises(CannotTravelError, match=rf"global variable {__name__}\.SHIFT .* requires a gradient"):
        send()


def test_an_attribute_that_comes_to_require_a_gradient_is_refused():
    module = nn.Linear(2, 2)
    module.config = types.SimpleNamespace(scale=torch.ones(2))
    send = Send(module)
    send()
    module.config.scale.requires_grad_()
    with pytest.raises(CannotTravelError, match="attribute config"):
        send()


def test_what_forward_has_kept_travels():
    module = nn.Linear(2, 2)
    module.kept = (module.weight * 2).tanh()
    Send(module)()


def test_what_is_computed_for_a_forward_is_refused():
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    module.kept = [other(torch.ones(2)).tanh()]
    with pytest.raises(CannotTravelError, match="attribute kept .* can be an input"):
        Send(module)()


def make_local():
    """Return a layer whose class travels by value, as one of ``__main__``, with a tensor and a module."""
    table, head = torch.ones(2), nn.Linear(2, 2).requires_grad_(False)

    class Local(nn.Linear):
        def forward(self, x):
            return head(super().forward(x)) + table

    return Local(2, 2), head


def test_a_class_takes_tensors_along():
    layer, _ = make_local()
    sender = ModuleSender(layer, Exporter(CPU))
    update, _kept = sender.update(sender.tensors())
    received = ModuleReceiver(Importer(CPU), lambda _: None).apply(update)
    x = torch.randn(3, 2)
    torch.testing.assert_close(received(x), layer(x))


def test_what_a_class_takes_along_is_refused_by_name():
    layer, head = make_local()
    head.requires_grad_()
    with pytest.raises(CannotTravelError, match="variable head in forward .* requires a gradient"):
        Send(layer)()


def test_buffers_that_require_gradients_are_connected_one_by_one():
    norm = nn.BatchNorm1d(2)
    assert is_direct(norm)
    norm.running_mean.requires_grad_()
    assert not is_direct(norm)
