"""A replica's plain attributes: those that a copy made at this moment would have."""

import functools
import types
import weakref
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from torch import nn

from everygpu.parallel.replicas.replica_set import ReplicaSet

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "x y")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.number = 3
        self.flags = {"on": True, "size": 4}
        self.names = ["a", "b"]
        self.marks = {1, 2}


class Pairing:
    """An original and its replica, brought up to date as often as asked."""

    def __init__(self, net):
        self.net = net
        self._replicas = ReplicaSet(net, [CPU] * 2)
        self.update()

    def update(self):
        _, self.replica = self._replicas.refresh([0, 1])
        return self.replica


class Munch(dict):
    """Shows its items as attributes, as munch's does."""

    def __getattr__(self, name):
        return self[name]

    def __setattr__(self, name, value):
        self[name] = value

    @property
    def __dict__(self):
        return dict(self)


class Refusing(dict):
    """As a frozen Box."""

    def __setitem__(self, key, value):
        raise TypeError

    __copy__ = None


class Irreps(tuple):
    """As e3nn's."""

    __slots__ = ()

    def __len__(self):
        raise NotImplementedError


def replica_of(net):
    return Pairing(net).replica


class TestFollowing:
    def test_nested_containers_are_the_originals_again_at_the_next_update(self):
        pairing = Pairing(Net())
        net, replica = pairing.net, pairing.replica
        net.held = {"a": [1, [net.inner]], "b": ({},)}
        pairing.update()
        replica.held["a"][1].append(2)
        replica.held["b"][0]["new"] = 3
        net.held["a"].append(4)
        held = pairing.update().held
        assert held == {"a": [1, [replica.inner], 4], "b": ({},)}
        kept = held["a"]
        assert pairing.update().held["a"] is kept  # nothing has changed: nothing is copied
        replica.held["a"][1].append(2)
        assert pairing.update().held["a"][1] == [replica.inner]

    def test_what_two_modules_hold_stays_one_thing_when_one_of_them_changes(self):
        pairing = Pairing(Net())
        pairing.net.held = pairing.net.inner.held = [1]
        pairing.update()
        pairing.net.number = 4
        assert pairing.update().held is pairing.replica.inner.held

    def test_hook_whose_closure_changes(self):
        net = Net()
        net.other = nn.Linear(2, 2)
        used = net.inner

        def hook(*_):
            return used

        net.register_forward_hook(hook)
        pairing = Pairing(net)
        assert next(iter(pairing.replica._forward_hooks.values()))() is pairing.replica.inner
        used = net.other
        assert next(iter(pairing.update()._forward_hooks.values()))() is pairing.replica.other

    def test_follows_changes_it_missed(self):
        pairing = Pairing(Net())
        pairing.net.inner.note = 8
        pairing._replicas.refresh([0])
        pairing.net.names.append("c")
        replica = pairing.update()
        assert (replica.inner.note, replica.names) == (8, ["a", "b", "c"])

    def test_a_container_of_two_modules_stays_one(self):
        net = Net()
        net.names = net.inner.names = ["a"]
        net.number = net.inner.other = [torch.ones(1)]
        pairing = Pairing(net)
        for change in (lambda: setattr(net, "note", 1), lambda: setattr(net.inner, "note", 1), lambda: None):
            change()
            replica = pairing.update()
            assert replica.names is replica.inner.names
            assert replica.names is not net.names
            assert replica.number is replica.inner.other
            pairing.replica.names.append("b")

    def test_shared_module_is_shared_in_the_replica(self):
        layer = nn.Linear(1, 1)
        replica = replica_of(nn.ModuleDict({"a": layer, "b": layer}))
        assert replica["a"] is replica["b"]
        assert replica["a"] is not layer

    def test_replica_counts_as_compiled_where_the_original_is(self):
        net = Net()
        wrapped = torch.compile(net, backend="eager")
        replica = replica_of(wrapped)
        assert type(replica) is Net
        assert replica.inner is not net.inner


class TestTranslation:
    """Whatever in an attribute leads to the original's modules or tensors leads to the replica's instead."""

    def check(self, make, find):
        """``find`` the module in what ``make`` puts around it."""
        net = Net()
        net.held = make(net.inner)
        replica = replica_of(net)
        assert find(net.held) is net.inner
        assert find(replica.held) is replica.inner

    @pytest.mark.parametrize(
        ("make", "find"),
        [
            (lambda m: [m], lambda v: v[0]),
            (lambda m: (1, m), lambda v: v[1]),
            (lambda m: {"m": m}, lambda v: v["m"]),
            (lambda m: OrderedDict(m=m), lambda v: v["m"]),
            (lambda m: defaultdict(list, m=m), lambda v: v["m"]),
            (lambda m: Pair(m, 1), lambda v: v.x),
            (lambda m: {m}, lambda v: next(iter(v))),
            (lambda m: frozenset([m]), lambda v: next(iter(v))),
            (lambda m: {"a": [(m,)]}, lambda v: v["a"][0][0]),
            (lambda m: weakref.ref(m), lambda v: v()),
            (lambda m: m.extra_repr, lambda v: v.__self__),
            (lambda m: types.MethodType(lambda self: self, m), lambda v: v()),
            (lambda m: functools.partial(lambda a, b: a, m), lambda v: v(1)),
            (lambda m: functools.partial(lambda a, b: b, b=m), lambda v: v(1)),
            (lambda m: functools.partial(functools.partial(lambda a: a), m), lambda v: v()),
            (lambda m: lambda: m, lambda v: v()),
            (lambda m: [lambda: [m]], lambda v: v[0]()[0]),
        ],
    )
    def test_module(self, make, find):
        self.check(make, find)

    def test_parameters_and_buffers(self):
        net = nn.BatchNorm1d(2)
        net.held = {"list": [net.weight], "closure": lambda: net.weight, "weak": weakref.ref(net.running_mean)}
        replica = replica_of(net)
        assert replica.held["list"][0] is replica.weight
        assert replica.held["closure"]() is replica.weight
        assert replica.held["weak"]() is replica.running_mean

    def test_module_of_another_tree_is_left_alone(self):
        net, other = Net(), nn.Linear(1, 1)
        net.__dict__["teacher"] = other
        net.held = [other]
        replica = replica_of(net)
        assert replica.teacher is other
        assert replica.held[0] is other

    def test_objects_functions_and_constants_are_shared(self):
        net = Net()
        net.thing, net.function, net.constant = object(), len, (1, "a")
        replica = replica_of(net)
        assert replica.thing is net.thing
        assert replica.function is net.function
        assert replica.constant is net.constant

    @pytest.mark.parametrize("make", [lambda m: Munch(m=m), lambda m: Refusing(m=m), lambda m: Irreps((1, m))])
    def test_objects_of_other_classes_than_the_built_in_are_shared(self, make):
        net = Net()
        net.held, net.listed = make(net.inner), [make(1)]
        pairing = Pairing(net)
        for _ in range(2):
            assert pairing.replica.held is net.held
            assert pairing.replica.listed[0] is net.listed[0]
            pairing.update()


class TestSharedWithFunctions:
    """A patched forward or a hook keeps what it was given: lists it fills, settings read from a dict."""

    def test_settings_that_a_patched_forward_reads(self):
        net, settings = Net(), {"scale": 1}
        old = net.inner.forward
        net.inner.forward = lambda x: old(x) * settings["scale"]
        pairing = Pairing(net)
        x = torch.ones(1, 2)
        before = pairing.replica.inner.forward(x)
        settings["scale"] = 3
        torch.testing.assert_close(pairing.update().inner.forward(x), before * 3)

    def test_counter_in_a_cell(self):
        net, count = Net(), 0
        old = net.inner.forward

        def forward(x):
            nonlocal count
            count += 1
            return old(x)

        net.inner.forward = forward
        replica_of(net).inner.forward(torch.ones(1, 2))
        assert count == 1
