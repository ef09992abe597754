"""Places in a module tree, and checks of the module to replicate."""

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


def no_grad(change):
    with torch.no_grad():
        change()


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
