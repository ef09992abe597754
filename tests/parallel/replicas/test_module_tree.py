"""Places in a module tree, and checks of the module to replicate."""

import copy

import pytest
import torch
from torch import nn

from everygpu.errors import ModuleError, PlacementError
from everygpu.parallel.replicas.module_tree import ModuleTree, check_module, place_module


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.decode = nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight
        self.again = self.norm
        self.nothing = None
        self.register_buffer("scale", torch.ones(1))
        self.register_parameter("empty", None)


def test_shared_modules_and_tensors_are_listed_once():
    net = Net()
    layout = ModuleTree(net)
    assert [type(m) for m in layout.modules] == [Net, nn.Linear, nn.BatchNorm1d, nn.Linear]
    assert layout.modules[0] is net
    expected = [*net.parameters(), *net.buffers()]
    assert len(layout.tensors) == len(expected)
    assert {id(t) for t in layout.tensors} == {id(t) for t in expected}


def test_places_hold_what_order_says():
    net = Net()
    layout = ModuleTree(net)
    places = layout.places(layout.modules)
    assert len(places) == len(layout.order)
    for (table, key), index in zip(places, layout.order):
        assert table[key] is (None if index is None else layout.tensors[index])
    assert layout.order.count(None) == 2  # the root's empty parameter, decode's bias
    tied = [t is net.encode.weight for t in layout.tensors].index(True)
    assert layout.order.count(tied) == 2


def test_places_of_a_twin_are_the_twins():
    net = Net()
    layout = ModuleTree(net)
    twin = copy.deepcopy(net)
    for (table, key), index in zip(layout.places(list(twin.modules())), layout.order):
        if index is not None:
            assert table[key] is not layout.tensors[index]
            assert table[key].shape == layout.tensors[index].shape


def test_module_without_tensors():
    layout = ModuleTree(nn.Identity())
    assert layout.tensors == layout.order == []
    assert layout.is_current()


def retie(net, weight):
    net.encode.weight = net.decode.weight = weight


def no_grad(change):
    with torch.no_grad():
        change()


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net.encode, "bias", nn.Parameter(torch.full((3,), 7.0))),
        lambda net: setattr(net, "scale", torch.full((1,), 7.0)),
        lambda net: no_grad(lambda: net.encode.weight.mul_(2)),
        lambda net: net.scale.data.add_(1),
        lambda net: net.load_state_dict(Net().state_dict()),
        lambda net: setattr(net.encode, "note", "new"),
        lambda net: net.eval(),
        lambda net: setattr(net.encode.bias, "data", torch.zeros(3)),
        lambda net: retie(net, nn.Parameter(torch.zeros(3, 3))),
    ],
    ids=["parameter", "buffer", "write", "through data", "load", "attribute", "mode", "data", "tied"],
)
def test_new_values_in_old_places_are_taken_on(change):
    net = Net()
    layout = ModuleTree(net)
    order = layout.order
    change(net)
    assert layout.is_current()
    assert layout.order == order
    assert {id(t) for t in layout.tensors} == {id(t) for t in (*net.parameters(), *net.buffers())}
    for (table, key), index in zip(layout.places(layout.modules), layout.order):
        assert table[key] is (None if index is None else layout.tensors[index])


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net.encode, "extra", nn.Linear(1, 1)),
        lambda net: setattr(net, "norm", nn.BatchNorm1d(3)),
        lambda net: delattr(net, "again"),
        lambda net: setattr(net, "_modules", {**net._modules, "more": nn.Identity()}),
        lambda net: net._modules.update(encoder=net._modules.pop("encode")),
        lambda net: setattr(net.encode, "gain", nn.Parameter(torch.ones(1))),
        lambda net: net.register_buffer("shift", torch.ones(1)),
        lambda net: setattr(net, "empty", nn.Parameter(torch.ones(1))),
        lambda net: setattr(net.encode, "bias", None),
        lambda net: setattr(net.decode, "weight", nn.Parameter(net.decode.weight.detach().clone())),
        lambda net: setattr(net.norm, "weight", net.norm.bias),
        lambda net: setattr(net.encode.weight, "data", torch.ones(4, 3)),
        lambda net: setattr(net.encode.weight, "data", net.encode.weight.data.t().contiguous().t()),
        lambda net: net.double(),
        lambda net: net.to("meta"),
        lambda net: net.encode.bias.requires_grad_(False),
        lambda net: net.scale.requires_grad_(),
        lambda net: nn.utils.parametrize.register_parametrization(net.encode, "weight", nn.Identity()),
    ],
    ids=["new module", "another module", "module removed", "another table", "name", "new parameter", "new buffer",
         "parameter where none was", "parameter removed", "untied", "tied", "shape", "strides", "dtype", "device",
         "frozen", "buffer in training", "parametrization"],
)  # fmt: skip
def test_another_arrangement_is_noticed(change):
    net = Net()
    layout = ModuleTree(net)
    assert layout.is_current()
    change(net)
    assert not layout.is_current()
    assert ModuleTree(net).is_current()


def test_replaced_module_is_noticed_deep_in_the_tree():
    net = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(1, 1))))
    layout = ModuleTree(net)
    net[0][0][0] = nn.Linear(1, 1)
    assert not layout.is_current()


def test_torch_replaces_the_table_of_children():
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    layout = ModuleTree(net)
    del net[0]
    assert not layout.is_same()
    assert not layout.is_current()


def test_sparse_parameter_has_no_strides():
    net = nn.Module()
    net.weight = nn.Parameter(torch.eye(3).to_sparse())
    assert ModuleTree(net).is_current()


CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_refused_at_the_top_too():
    with pytest.raises(ModuleError, match="got one at 'the top'"):
        check_module(torch.jit.script(nn.Linear(1, 1)), "caller")


def test_buffers_count_too():
    module = nn.Linear(1, 1)
    module.register_buffer("mask", torch.ones(1, device=META))
    with pytest.raises(PlacementError, match=r"got 'weight' on cpu and 'mask' on meta. Move it .*module.to\('cpu'\)"):
        place_module(module, CPU, "caller")


@pytest.mark.parametrize("lazy", [nn.LazyLinear(2), nn.LazyBatchNorm1d()], ids=["parameter", "buffer"])
def test_lazy_module_is_told_to_run_first(lazy):
    with pytest.raises(ModuleError, match="caller: parameters need a shape, got the lazy '.*'. Run one batch"):
        place_module(lazy, CPU, "caller")
