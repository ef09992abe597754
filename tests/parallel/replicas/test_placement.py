"""What may be replicated, and bringing it together on one device."""

import pytest
import torch
from torch import nn

from everygpu.errors import ModuleError, PlacementError
from everygpu.parallel.replicas.module_tree import check_module, place_module

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
