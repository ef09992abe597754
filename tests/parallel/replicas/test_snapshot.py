"""Changes of modules' plain attributes are noticed, at any depth."""

import enum
import functools
import types
import weakref
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from everygpu.parallel.replicas.snapshot import Snapshot
from tests.parallel.replicas.test_attributes import Net

Pair = namedtuple("Pair", "x y")
ALIVE = torch.ones(1)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "number", 4),
        lambda net: setattr(net, "number", 3.0),
        lambda net: setattr(net, "new", None),
        lambda net: delattr(net, "number"),
        lambda net: net.flags.update(on=False),
        lambda net: net.flags.pop("on"),
        lambda net: net.flags.update(new=1),
        lambda net: net.flags.update(new=torch.ones(2)),
        lambda net: net.names.append("c"),
        lambda net: net.names.reverse(),
        lambda net: net.names.__setitem__(0, torch.ones(2)),
        lambda net: net.marks.add(3),
        lambda net: setattr(net, "training", False),
        lambda net: setattr(net, "forward", lambda x: x),
        lambda net: net.register_forward_hook(lambda *_: None),
        lambda net: net.register_forward_pre_hook(lambda *_: None),
        lambda net: net.register_full_backward_hook(lambda *_: None),
        lambda net: net.__dict__.update(number=5),
        lambda net: net.__dict__.update(other=net.__dict__.pop("number")),
        lambda net: setattr(net, "tensor", torch.ones(2)),
        # `==` doesn't see these, a forward does: `range(net.flags["size"])`, `next(iter(net.flags))`.
        lambda net: net.flags.__setitem__("size", 4.0),
        lambda net: net.flags.__setitem__("on", 1),
        lambda net: net.names.__setitem__(0, type("Name", (str,), {})("a")),
        lambda net: net.flags.__setitem__("on", net.flags.pop("on")),
    ],
)
def test_change_of_a_plain_attribute(change):
    net = Net()
    snapshot = Snapshot(list(net.modules()))
    snapshot.changed()
    change(net)
    assert snapshot.changed() == [0]


def test_change_in_a_child_is_the_childs():
    net = Net()
    snapshot = Snapshot(list(net.modules()))
    snapshot.changed()
    net.inner.note = "new"
    assert snapshot.changed() == [1]
    net.eval()
    assert snapshot.changed() == [0, 1]


def holding(value):
    net = Net()
    net.held = value(net) if isinstance(value, types.LambdaType) else value
    return net


class Options:
    """With an attribute of its own class."""


class Named(dict):
    """With attributes beside its items."""


class Color(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Frozen:
    name: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    name: Any


@dataclass
class Plain:
    name: Any


def read(scale=(1,), *, shift=0):
    return scale, shift


def test_function_over_the_trees_own_tensors():
    net = Net()
    first = net.inner.weight

    def make():
        used = first

        def function(other=None):
            nonlocal used
            used = used if other is None else other
            return used

        return function

    net.held = make()
    assert Snapshot([net]).changed() == [0]


@pytest.mark.parametrize("make", [lambda t: [t], lambda t: {"all": [t]}, lambda t: lambda: t, weakref.ref])
def test_tensors_that_are_not_compared_elsewhere_are_always_stale(make):
    """A replica's copies are others at each forward: it gets its lists of them anew."""
    net = Net()
    net.held = make(net.inner.weight)
    snapshot = Snapshot(list(net.modules()))
    snapshot.changed()
    assert snapshot.changed() == [0]


@pytest.mark.parametrize(
    ("value", "is_volatile"),
    [
        ([Options()], False),
        ([Plain(torch.ones(1))], False),
        (Named(a=torch.ones(1)), False),
        ([nn.Linear(1, 1)], False),
        (lambda x, seen=[ALIVE]: seen, False),
        ([torch.ones(1)], True),
        ({"a": (torch.ones(1),)}, True),
        ([lambda: ALIVE, ALIVE], True),
        (functools.partial(read, torch.ones(1)), True),
        (weakref.ref(ALIVE), True),
    ],
)
def test_replicas_share_all_but_tensors_and_plain_containers(value, is_volatile):
    net = Net()
    net.held = value
    snapshot = Snapshot(list(net.modules()))
    snapshot.changed()
    assert snapshot.changed() == ([0] if is_volatile else [])


def test_hooks_of_state_dicts_are_no_part_of_a_forward():
    """weight_norm has one, and would be translated at every forward and never recorded."""
    net = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    net.register_state_dict_post_hook(lambda *_: None)
    net.register_state_dict_pre_hook(lambda *_: None)
    net.register_load_state_dict_post_hook(lambda *_: None)
    snapshot = Snapshot(list(net.modules()))
    snapshot.changed()
    assert snapshot.changed() == []
    net.register_state_dict_pre_hook(lambda *_: None)
    assert snapshot.changed() == [0]
