"""Changes of modules' plain attributes are noticed, at any depth."""

import enum
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
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
    ],
)
def test_change_of_a_plain_attribute(change):
    net = Net()
    snapshot = Snapshot(list(net.modules()))
    snapshot.changed()
    change(net)
    assert snapshot.changed() == [0]


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.flags.__setitem__("size", 4.0),
        lambda net: net.flags.__setitem__("on", 1),
        lambda net: net.names.__setitem__(0, type("Name", (str,), {})("a")),
        lambda net: net.flags.__setitem__("on", net.flags.pop("on")),
    ],
    ids=["float for int", "int for bool", "subclass", "order of keys"],
)
def test_change_to_something_equal(change):
    """``==`` doesn't see it, a forward does: ``range(net.flags["size"])``, ``next(iter(net.flags))``."""
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


def changes(net, change, known=()):
    """Tell whether a change is noticed, in a net that was not taken for changed before it."""
    snapshot = Snapshot(list(net.modules()), known, is_strict=True)
    snapshot.changed()
    assert snapshot.changed() == []
    assert snapshot.is_same()
    change(net.held)
    found = snapshot.changed()
    assert snapshot.changed() == []
    return found == [0]


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


@dataclass(slots=True)
class Hidden:
    name: Any


def read(scale=(1,), *, shift=0):
    return scale, shift


def counting():
    count = 0

    def step(reset=None):
        nonlocal count
        count = count + 1000 if reset is None else reset

    return step


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([[1]], lambda v: v[0].append(2)),
        ([[1]], lambda v: v[0].__setitem__(0, True)),
        ([[1], [2]], lambda v: v[1].append(v[0].pop())),
        ([[[]]], lambda v: v[0][0].append(1)),
        ({"a": {"b": 1}}, lambda v: v["a"].update(b=2)),
        ({"a": {"b": 1}}, lambda v: v["a"].update(c=v["a"].pop("b"))),
        (([1],), lambda v: v[0].append(2)),
        (({},), lambda v: v[0].update(a=1)),
        ([{1}], lambda v: v[0].add(2)),
        ([{1}], lambda v: (v[0].clear(), v[0].add(True))),
        (deque([1, 2]), lambda v: v.rotate()),
        (OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
        (defaultdict(list), lambda v: v["new"]),
        (Pair([1], 2), lambda v: v.x.append(2)),
        ([nn.Linear, Options], lambda v: v.__setitem__(0, nn.Conv2d)),
        ({"kind": nn.Linear}, lambda v: v.update(kind=nn.Conv2d)),
        ([len, read, torch.relu, str.upper], lambda v: v.__setitem__(0, max)),
        ([torch.float32, Color.RED, range(3), ...], lambda v: v.__setitem__(0, torch.float64)),
        ([numpy.float64(1)], lambda v: v.__setitem__(0, numpy.float64(1))),
        ([functools.partial(read, 1)], lambda v: v[0].keywords.update(shift=1)),
        ([[].append], lambda v: v[0](1)),
        ([counting()], lambda v: v[0]()),
        ([lambda x, seen=[]: seen], lambda v: v[0].__defaults__[0].append(1)),
        ([lambda x, scale=1: x * scale], lambda v: setattr(v[0], "__defaults__", (2,))),
        (Named(a=1), lambda v: setattr(v, "note", 1)),
        ([Named(a=1)], lambda v: setattr(v[0], "note", 1)),
        ([Frozen([1])], lambda v: v[0].name.append(2)),
        ([Frozen(1)], lambda v: v.__setitem__(0, Frozen(1))),
        ([Slotted([1])], lambda v: v[0].name.append(2)),
        ([Plain(1)], lambda v: setattr(v[0], "name", 2)),
        ([Plain(Plain({}))], lambda v: v[0].name.name.update(a=1)),
        (lambda net: [net.inner], lambda v: v.append(v[0])),
        (lambda net: {"m": (net.inner,)}, lambda v: v.clear()),
        (lambda net: [net.inner.forward], lambda v: v.clear()),
        (lambda net: [weakref.ref(net.inner)], lambda v: v.clear()),
    ],
)  # fmt: skip
def test_change_at_any_depth(value, change):
    assert changes(holding(value), change)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (lambda net: [net.inner.weight], lambda v: v.__setitem__(0, torch.ones(2, 2))),
        (lambda net: [[net.inner.weight, net.inner.bias]], lambda v: v[0].reverse()),
        (lambda net: {"w": net.inner.weight}, lambda v: v.update(w=v["w"].detach())),
        (lambda net: [weakref.ref(net.inner.weight)], lambda v: v.__setitem__(0, weakref.ref(v[0]().detach()))),
        (lambda net: [Plain(net.inner.weight)], lambda v: setattr(v[0], "name", None)),
    ],
)
def test_change_where_the_trees_own_tensors_are(value, change):
    net = holding(value)
    snapshot = Snapshot(list(net.modules()), known=list(net.parameters()), is_strict=True)
    snapshot.changed()
    assert snapshot.changed() == []
    change(net.held)
    assert snapshot.changed() == [0]


def test_function_over_the_trees_own_tensors():
    net = Net()
    first, second = net.inner.weight, net.inner.bias

    def make():
        used = first

        def function(other=None):
            nonlocal used
            used = used if other is None else other
            return used

        return function

    net.held = make()
    assert changes(net, lambda function: function(second), known=[first, second])
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
    "value",
    [
        torch.ones(1),
        [torch.ones(1)],
        [[{"a": (torch.ones(1),)}]],
        ([[object()]],),
        [nn.Linear(1, 1)],
        [nn.Linear(1, 1).forward],
        [weakref.ref(Options)],
        [Options()],
        [Plain(Options())],
        [Frozen(torch.ones(1))],
        [Hidden(1)],
        [torch.Generator()],
        [types.MappingProxyType({})],
        [numpy.ones(1)],
        [counting, functools.partial(read, Options())],
        functools.partial(read, torch.ones(1)),
        weakref.ref(ALIVE),
        deque([torch.ones(1)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_change_unseen_is_always_stale(value):
    net = Net()
    net.held = value
    snapshot = Snapshot(list(net.modules()), is_strict=True)
    snapshot.changed()
    assert snapshot.changed() == [0]
    assert not snapshot.is_same()
    assert snapshot.volatile == {0: "held"}
    net.held = None
    assert snapshot.changed() == [0]
    assert snapshot.changed() == []


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
