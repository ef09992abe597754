"""What forward changes outside its module is noticed before it runs in other processes."""

import re
import types

import numpy
import pytest
import torch
from torch import nn

from everygpu.parallel.engines.processes.side_effects import SideEffects
from tests.parallel.engines.processes import config_module

NUM_CALLS = 0
LOG = []
SEEN = {}
COUNTS = numpy.zeros(3)
TOTAL = torch.zeros(1)


class Statistics:
    num_rows = 0


class Net(nn.Module):
    def __init__(self, effect=lambda self, x: None):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.config = types.SimpleNamespace(scale=1.0, steps=[])
        self.options = [types.SimpleNamespace(scale=1.0)]
        self.calls = []
        self.effect = effect
        self.register_buffer("num", torch.zeros(()))

    def forward(self, x):
        self.effect(self, x)
        self.calls.append(1)  # each replica has a list of its own
        self.last = x
        self.num += 1
        return self.linear(x)


def count(net, x):
    global NUM_CALLS
    NUM_CALLS += 1


def delete(net, x):
    global SEEN
    del SEEN


def make_counter():
    calls, num = [], 0

    def in_list(net, x):
        calls.append(len(x))

    def in_cell(net, x):
        nonlocal num
        num += 1

    return in_list, in_cell


def set_config(net, x):
    net.config.scale = 2.0


def set_module(net, x):
    config_module.SCALE = float(len(x))


def set_class(net, x):
    Statistics.num_rows = Statistics.num_rows + len(x)


IN_LIST, IN_CELL = make_counter()
HERE = r"test_side_effects\.py:\d+"
EFFECTS = {
    "global": (count, rf"global variable {__name__}.NUM_CALLS \(.*{HERE}\)"),
    "deleted": (delete, rf"global variable {__name__}.SEEN \(.*{HERE}\)"),
    "list": (lambda net, x: LOG.append(len(x)), rf"global variable {__name__}.LOG \(.*{HERE}\)"),
    "dict": (lambda net, x: SEEN.update({len(SEEN): 1}), "SEEN"),
    "array": (lambda net, x: numpy.add(COUNTS, 1, out=COUNTS), "COUNTS"),
    "tensor": (lambda net, x: TOTAL.add_(1), "TOTAL"),
    "closure's list": (IN_LIST, rf"variable calls in .*{HERE}"),
    "closure's number": (IN_CELL, rf"variable num in .*{HERE}"),
    "another module": (set_module, rf"global variable {config_module.__name__}.SCALE"),
    "class attribute": (set_class, rf"class attribute Statistics.num_rows \(.*{HERE}\)"),
    "configuration": (set_config, rf"attribute 'scale' of the SimpleNamespace in attribute config \(.*{HERE}\)"),
    "list in a configuration": (
        lambda net, x: net.config.steps.append(1),
        "what is in the SimpleNamespace in attribute config",
    ),
    "object in a list": (lambda net, x: vars(net.options[0]).update(scale=3.0), "SimpleNamespace in attribute options"),
}


def look(net, *calls):
    effects = SideEffects(net)
    effects.begin()
    for x in calls:
        net(x)
    return effects.end()


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    for name in ("NUM_CALLS", "SEEN"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setattr(config_module, "SCALE", config_module.SCALE)


@pytest.mark.parametrize(("effect", "reason"), EFFECTS.values(), ids=EFFECTS)
def test_an_effect_is_noticed(effect, reason):
    net = nn.Sequential(Net(effect))[0]
    assert look(net) is None
    x = torch.ones(2, 3)
    found = look(net, x)
    assert found is not None
    assert found.startswith("forward changes ")
    assert "\n" not in found
    assert re.search(reason, found), found


def test_own_attributes_and_what_is_only_read_are_no_effects():
    assert look(Net(lambda net, x: x * config_module.SCALE + len(LOG) + COUNTS[0]), torch.ones(2, 3)) is None


@pytest.mark.parametrize(
    ("add", "reason"),
    [
        (
            lambda net: net.linear.register_forward_hook(lambda *_: None),
            "module 'linear' has hooks, which would run in",
        ),
        (lambda net: net.register_forward_pre_hook(lambda *_: None), "module 'Net' has hooks"),
        (lambda net: net.linear.register_full_backward_hook(lambda *_: None), "module 'linear' has hooks"),
        (lambda net: net.linear.weight.register_hook(lambda grad: None), "parameter linear.weight has hooks"),
    ],
)
def test_hooks_are_effects(add, reason):
    net = Net()
    add(net)
    assert reason in look(net)


def test_hooks_of_torch_are_none():
    net = Net()
    nn.utils.spectral_norm(net.linear)
    assert look(net) is None
