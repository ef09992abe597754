"""Code that looks at ``torch.nn.DataParallel`` finds one: its class and its attributes."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import everygpu
from everygpu import DataParallel
from everygpu.devices.parse import device_id, parse_target
from everygpu.errors import DeviceError, OptionError
from everygpu.keys import unwrap
from everygpu.parallel.replicas.placement import without_wrappers
from tests.parallel.test_data_parallel import Net, build

CPU = torch.device("cpu")


def test_is_torchs(devices):
    used = devices(2)
    model = DataParallel(build(), used)
    assert isinstance(model, nn.DataParallel)
    assert model.module is unwrap(model) is without_wrappers(model, "test")
    assert model.src_device_obj == used[0] == model.replica_devices[0]
    assert model.dim == 0


def test_devices_are_named_as_by_torch(devices):
    used = devices(3)
    model = DataParallel(build(), used, output_device=used[1])
    assert model.device_ids == [d.index if d.type == "cuda" else d for d in used]
    assert model.output_device == (used[1].index if used[1].type == "cuda" else used[1])
    assert model.replica_devices == tuple(used)


def test_a_cuda_device_is_named_by_its_index():
    assert [device_id(torch.device(name)) for name in ("cuda:3", "cpu", "meta")] == [3, CPU, torch.device("meta")]


def test_minus_one_is_the_cpu(devices):
    used = devices(2)
    model = DataParallel(build(), used, output_device=-1)
    assert model.output_device == CPU
    x = torch.randn(4, 3)
    assert model(x).device == CPU
    joined = everygpu.gather([torch.ones(2, device=d) for d in used], -1)
    assert joined.device == CPU
    assert joined.tolist() == [1] * 4
    assert everygpu.gather(DataParallel(build(), used)(x), -1).device == CPU


def test_minus_one_is_no_replica():
    assert parse_target(-1) == CPU
    with pytest.raises(DeviceError):
        DataParallel(build(), [-1])


def test_devices_can_be_set():
    model = DataParallel(build(), ["cpu"] * 2)
    model(torch.randn(6, 3))
    model.device_ids = ["cpu"] * 3
    model.output_device = "cpu"
    model.module.rows.clear()
    assert model(torch.randn(6, 3)).shape == (6, 2)
    assert model.module.rows == [2]
    with pytest.raises(DeviceError, match="device_ids is empty"):
        model.device_ids = []


def test_attributes_of_the_module_stay_in_reach():
    net = build()
    net.devices, net.gather_all = "mine", 3
    model = DataParallel(net, ["cpu"] * 2)
    assert (model.devices, model.gather_all) == ("mine", 3)
    model.devices = "set"
    assert net.devices == "set"


def test_the_rule_of_gather_can_be_set():
    model, x = DataParallel(build(), ["cpu"] * 2), torch.randn(4, 3)
    assert type(model(x)) is everygpu.ShardedBatch
    model.gather_rule = "joined"
    assert type(model(x)) is torch.Tensor
    with pytest.raises(OptionError, match="got 'joined'. Set gather_rule"):
        model.gather = "joined"


def test_what_libraries_do_next():
    """As ``unwrap_model`` and training loops do, which branch on the class."""
    model = DataParallel(build(), ["cpu"] * 2)
    bare = model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else model
    assert type(bare) is Net
    for t in (*model.module.parameters(), *model.module.buffers()):
        assert t.device == model.src_device_obj
    assert len(model.device_ids) == 2
    loss = model(torch.randn(6, 3)).sum()
    loss.backward()
    assert nn.DataParallel.zero_grad is nn.Module.zero_grad


class TestPickles:
    def test_of_another_machine_give_the_module(self):
        state = DataParallel(build(), ["cpu"]).__getstate__()
        state["replica_devices"] = torch.device("cuda", 98), torch.device("cuda", 99)
        state["_output_device"] = state["replica_devices"][1]
        twin = DataParallel.__new__(DataParallel)
        twin.__setstate__(state)
        assert (twin.device_ids, twin.output_device) == ([98, 99], 99)
        assert type(twin.module) is Net

    @pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
    def test_keep_what_they_are(self, how):
        model = DataParallel(build(), ["cpu"] * 2, output_device=-1, gather="joined")
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        make = {
            "deepcopy": lambda: copy.deepcopy(model),
            "pickle": lambda: pickle.loads(pickle.dumps(model)),
            "torch.save": lambda: torch.load(buffer, weights_only=False),
        }
        twin = make[how]()
        assert isinstance(twin, nn.DataParallel)
        assert (twin.device_ids, twin.output_device, twin.gather_rule) == ([CPU] * 2, CPU, "joined")
