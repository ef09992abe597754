"""Other tensors in place of a module's parameters, wherever its attributes lead to these."""

import functools

import pytest
import torch
from torch import nn

from everygpu.parallel.replicas.remap import Remap, in_place_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)


def placeholders(net):
    return {id(p): p.detach().clone().requires_grad_() for p in net.parameters()}


def test_partial_keeps_its_arguments_and_attributes():
    old, new = nn.Linear(1, 1), nn.Linear(1, 1)
    partial = functools.partial(lambda *args, **kwargs: (args, kwargs), 1, old, a=2, b=old)
    partial.label, partial.owner = "mine", old
    twin = Remap({id(old): new}).of(partial)
    assert twin(5, c=6) == ((1, new, 5), {"a": 2, "b": new, "c": 6})
    assert (twin.label, twin.owner) == ("mine", new)
    assert partial.owner is old


def test_every_way_in_which_a_function_refers():
    old, new, count = nn.Linear(1, 1), nn.Linear(1, 1), 0

    def function(default=old, *, keyword=old):
        nonlocal count
        count += 1  # a cell that stays is shared
        return closed, default, keyword, function.attribute, count

    closed, function.attribute = old, old
    remap = Remap({id(old): new})
    twin = remap.of(function)
    assert twin() == (new, new, new, new, 1)
    assert function() == (old, old, old, old, 2)
    assert remap.of(function) is twin
    assert Remap({id(new): old}).of(function) is function


def test_what_leads_to_no_parameter_is_left_alone():
    net = Net()
    net.plain, net.module, net.tensors = {"a": [1, (2,)]}, [net.inner], [torch.ones(1), net.inner.bias]
    held = vars(net).copy()
    others = placeholders(net)
    del others[id(net.inner.bias)]
    with in_place_of(net, others):
        assert all(vars(net)[k] is v for k, v in held.items())
        assert net.inner.bias is net.tensors[1]


def test_containers_within_themselves_and_shared_ones():
    net = Net()
    net.loop = loop = [net.inner.weight]
    loop.append(loop)
    net.first = net.second = [net.inner.bias]
    others = placeholders(net)
    with in_place_of(net, others):
        assert net.loop[0] is net.inner.weight
        assert net.first is net.second
        assert net.first[0] is net.inner.bias
    assert net.loop is loop


def test_what_was_set_meanwhile_stays():
    net = Net()
    net.held = [net.inner.weight]
    new = nn.Parameter(torch.ones(2, 2))
    with in_place_of(net, placeholders(net)):
        net.held, net.inner.weight = "new", new
    assert net.held == "new"
    assert net.inner.weight is new


def test_values_come_back_after_an_error():
    net = nn.LSTM(2, 3)
    before = {**vars(net), **net._parameters}
    with pytest.raises(KeyError), in_place_of(net, placeholders(net)):
        raise KeyError
    assert {**vars(net), **net._parameters} == before
