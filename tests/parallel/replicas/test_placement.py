"""What may be replicated, and bringing it together on one device."""

import logging

import pytest
import torch
from torch import nn

from everygpu.errors import ModuleError, PlacementError
from everygpu.parallel.replicas.placement import check_module, place_module

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (torch.optim.Adam([torch.ones(1)]), r"the optimizer Adam. Wrap the model, .* from model.parameters\(\)"),
        (nn.ReLU, r"got the class ReLU. Call it: ReLU\(\.\.\.\)"),
        (torch.relu, "got builtin_function_or_method. Put a function into the forward"),
        (torch.ones(1), "got Tensor"),
        ("resnet18", "got str"),
    ],
)
def test_what_is_no_module_is_refused_in_the_callers_name(module, words):
    with pytest.raises(ModuleError, match=f"^caller: needs a .*{words}"):
        check_module(module, "caller")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_refused_at_the_top_too():
    with pytest.raises(ModuleError, match="got one at 'the top'"):
        check_module(torch.jit.script(nn.Linear(1, 1)), "caller")


def test_module_elsewhere_is_moved_with_one_line(caplog):
    module = nn.BatchNorm1d(2)
    with caplog.at_level(logging.INFO, logger="everygpu"):
        place_module(module, META, "caller")
    assert {t.device for t in module.state_dict().values()} == {META}
    assert [r.getMessage() for r in caplog.records] == ["caller: moving the module from cpu to meta"]


def test_strict_raises_torchs_message_and_moves_nothing():
    module = nn.Linear(1, 1)
    words = r"^module must have its parameters and buffers on device meta \(device_ids\[0\]\) but found one .*: cpu$"
    with pytest.raises(PlacementError, match=words):
        place_module(module, META, "caller", strict=True)
    assert module.weight.device == CPU


def test_buffers_count_too():
    module = nn.Linear(1, 1)
    module.register_buffer("mask", torch.ones(1, device=META))
    with pytest.raises(PlacementError, match=r"got 'weight' on cpu and 'mask' on meta. Move it .*module.to\('cpu'\)"):
        place_module(module, CPU, "caller")


@pytest.mark.parametrize("lazy", [nn.LazyLinear(2), nn.LazyBatchNorm1d()], ids=["parameter", "buffer"])
def test_lazy_module_is_told_to_run_first(lazy):
    with pytest.raises(ModuleError, match="caller: parameters need a shape, got the lazy '.*'. Run one batch"):
        place_module(lazy, CPU, "caller")
