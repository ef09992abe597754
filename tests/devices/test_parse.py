"""Every way to write devices, and every way to get it wrong."""

import numpy as np
import pytest
import torch

from everygpu.devices.parse import parse_device, parse_devices
from everygpu.errors import DeviceError, EveryGPUError

CPU = torch.device("cpu")


def cuda(*indices):
    return [torch.device("cuda", index) for index in indices]


@pytest.fixture
def no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


@pytest.fixture
def three_gpus(monkeypatch):
    """A machine with three CUDA devices, the second current."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)


@pytest.fixture
def one_mps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)


@pytest.mark.usefixtures("no_accelerator")
class TestWithoutAccelerator:
    def test_none_is_the_cpu(self):
        assert parse_devices(None) == [CPU]

    @pytest.mark.parametrize(
        ("device_ids", "num_replicas"),
        [
            ("cpu", 1),
            (["cpu"], 1),
            (["cpu"] * 3, 3),
            (("cpu", CPU, "cpu:0", torch.device("cpu", 1)), 4),
            ((name for name in ["cpu", "cpu"]), 2),
        ],
    )
    def test_cpu_replicas_are_all_plain_cpu(self, device_ids, num_replicas):
        devices = parse_devices(device_ids)
        assert devices == [CPU] * num_replicas
        assert all(device.index is None for device in devices)

    @pytest.mark.parametrize("device", [0, [0], "cuda", ["cuda:0"], [torch.device("cuda:1")], np.int64(0)])
    def test_cuda_is_told_to_be_absent(self, device):
        with pytest.raises(DeviceError, match=r"No CUDA for .*only 'cpu'"):
            parse_devices(device)

    def test_reason_without_cuda_is_torch_itself(self, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", None)
        with pytest.raises(DeviceError, match="install a CUDA build"):
            parse_devices([0])

    def test_reason_with_cuda_is_the_driver_or_the_environment(self, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        with pytest.raises(DeviceError, match="nvidia-smi and CUDA_VISIBLE_DEVICES"):
            parse_devices([0])

    @pytest.mark.parametrize("name", ["mps", "xpu:0", torch.device("mps")])
    def test_other_types_are_absent(self, name):
        with pytest.raises(DeviceError, match=r"This machine has no .*only 'cpu'"):
            parse_devices([name])

    @pytest.mark.parametrize("name", ["meta", "meta:0", torch.device("meta")])
    def test_meta_is_no_device_to_train_on(self, name):
        with pytest.raises(DeviceError, match=r"meta.* have no values to train\..*only 'cpu'"):
            parse_devices([name])

    def test_the_names_of_others_mean_cuda(self):
        with pytest.raises(DeviceError, match=r"'gpu:0' is no device name.* Did you mean 'cuda:0'\? .*only 'cpu'"):
            parse_devices(["gpu:0"])


@pytest.mark.parametrize(
    ("name", "meant"),
    [("gpu:0", "cuda:0"), ("GPU", "cuda"), ("cuda1", "cuda:1"), ("CUDA:2", "cuda:2"), ("cuda ", "cuda")],
)
@pytest.mark.usefixtures("three_gpus")
def test_names_that_others_use_say_what_is_meant(name, meant):
    with pytest.raises(DeviceError, match=rf"'{name}' is no device name; 'cuda:0' is one\. Did you mean '{meant}'\?"):
        parse_devices([name])


@pytest.mark.parametrize(
    "name", ["gpu", "gpu:0", "", "0", "cuda:", "cuda:-1", "cuda:x", "cuda:0x", "CUDA:0", "cpu ", "cuda:0,1", ":0"]
)
@pytest.mark.usefixtures("three_gpus")
def test_unknown_name_says_what_there_is(name):
    with pytest.raises(DeviceError, match=r"is no device name.*'cpu' and 3 of 'cuda'") as caught:
        parse_devices([name])
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("entry", [True, False, 1.0, None, b"cuda", object(), ["cuda:0"], {}])
@pytest.mark.usefixtures("three_gpus")
def test_entry_of_a_wrong_type(entry):
    with pytest.raises(DeviceError, match=r"is no device\. Pass an int, a str or a torch\.device") as caught:
        parse_devices([0, entry])
    assert repr(entry) in str(caught.value)


@pytest.mark.parametrize("device_ids", [True, 1.5, object()])
def test_lone_value_of_a_wrong_type(device_ids):
    with pytest.raises(DeviceError, match="Pass an int, a str or a torch.device"):
        parse_devices(device_ids)


@pytest.mark.parametrize("device_ids", [[], (), range(0)])
def test_no_entry(device_ids):
    with pytest.raises(DeviceError, match="device_ids is empty"):
        parse_devices(device_ids)


@pytest.mark.usefixtures("three_gpus")
class TestWithGpus:
    @pytest.mark.parametrize(
        ("device_ids", "indices"),
        [
            (None, (0, 1, 2)),
            (2, (2,)),
            ("cuda:2", (2,)),
            (torch.device("cuda:0"), (0,)),
            ([2, 0], (2, 0)),
            (range(3), (0, 1, 2)),
            (np.array([0, 2]), (0, 2)),
            ([0, "cuda:1", torch.device("cuda", 2)], (0, 1, 2)),
            ("cuda", (1,)),
            (["cuda", 0], (1, 0)),
        ],
    )
    def test_every_way_to_write_them(self, device_ids, indices):
        devices = parse_devices(device_ids)
        assert devices == cuda(*indices)
        assert all(type(device) is torch.device for device in devices)

    @pytest.mark.parametrize("device", [3, -1, "cuda:3", "cuda:300", "cuda:256", torch.device("cuda:44")])
    def test_index_beyond_the_last_says_how_many_there_are(self, device):
        with pytest.raises(DeviceError, match=r"cuda has 3 here\. Use 0 to 2"):
            parse_devices([0, device])

    @pytest.mark.parametrize("device_ids", [[0, 0], [0, "cuda:0"], [1, 0, torch.device("cuda:1")], ["cuda", 1]])
    def test_same_gpu_twice(self, device_ids):
        with pytest.raises(DeviceError, match=r"device_ids names cuda:[01] twice"):
            parse_devices(device_ids)

    @pytest.mark.parametrize("device_ids", [["cpu", 0], [0, 1, "cpu"]])
    def test_mixed_types(self, device_ids):
        with pytest.raises(DeviceError, match="device_ids mixes cpu and cuda"):
            parse_devices(device_ids)

    def test_cpu_replicas_are_still_possible(self):
        assert parse_devices(["cpu", "cpu"]) == [CPU, CPU]

    def test_other_accelerator_is_absent(self):
        with pytest.raises(DeviceError, match=r"This machine has no 'mps'"):
            parse_device("mps")


@pytest.mark.usefixtures("one_mps")
class TestWithMps:
    @pytest.mark.parametrize("device_ids", [None, "mps", ["mps:0"], [torch.device("mps")]])
    def test_it_has_an_index(self, device_ids):
        assert parse_devices(device_ids) == [torch.device("mps", 0)]

    def test_there_is_one(self):
        with pytest.raises(DeviceError, match=r"No device 'mps:1': mps has 1 here. Use 0,"):
            parse_devices("mps:1")

    def test_an_int_means_cuda(self):
        with pytest.raises(DeviceError, match="No CUDA for 0"):
            parse_devices([0])


def test_one_device():
    assert parse_device("cpu") == CPU
    with pytest.raises(DeviceError):
        parse_device(True)


def test_naming_the_cpu_asks_no_driver(monkeypatch):
    def fail(*args, **kwargs):
        pytest.fail("the machine was asked for its accelerators")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", fail)
    assert parse_devices(["cpu", "cpu:0", CPU]) == [CPU] * 3


def test_accelerator_of_another_make_is_known_by_its_own_name(monkeypatch):
    here = torch.device("hpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: here)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert parse_devices(["hpu:1", "hpu:0"]) == [torch.device("hpu", 1), torch.device("hpu", 0)]


def test_errors_are_ours_and_the_builtin_callers_catch():
    with pytest.raises(EveryGPUError):
        parse_devices([])
    with pytest.raises(RuntimeError):
        parse_devices([])


@pytest.mark.gpu
def test_real_devices():
    count = torch.cuda.device_count()
    assert parse_devices(None) == cuda(*range(count))
    assert parse_devices("cuda") == cuda(torch.cuda.current_device())
    with pytest.raises(DeviceError, match=f"has {count} here"):
        parse_devices([count])
    for device in parse_devices(None):
        assert torch.zeros(1, device=device).device == device
