"""Every way to write devices, and every way to get it wrong."""

import numpy as np
import pytest
import torch

from everygpu.devices.parse import parse_device, parse_devices
from everygpu.errors import DeviceError

CPU = torch.device("cpu")


def cuda(*indices):
    return [torch.device("cuda", index) for index in indices]


@pytest.fixture
def machine(monkeypatch):
    """Make torch see an accelerator and so many of them, the ``current`` one in use; none by default."""

    def install(kind=None, count=0, current=0):
        device = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count if kind == "cuda" else 0)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)

    install()
    return install


@pytest.fixture
def three_gpus(machine):
    """A machine with three CUDA devices, the second current."""
    machine("cuda", 3, current=1)


@pytest.mark.usefixtures("machine")
class TestWithoutAccelerator:
    @pytest.mark.parametrize(
        ("device_ids", "num_replicas"),
        [
            (None, 1),
            ("cpu", 1),
            (["cpu"] * 3, 3),
            (("cpu", CPU, "cpu:0", torch.device("cpu", 1)), 4),
            ((name for name in ["cpu", "cpu"]), 2),
        ],
    )
    def test_cpu_replicas_are_all_plain_cpu(self, device_ids, num_replicas):
        devices = parse_devices(device_ids)
        assert devices == [CPU] * num_replicas
        assert all(device.index is None for device in devices)

    @pytest.mark.parametrize("device", [0, [0], "cuda", [torch.device("cuda:1")], np.int64(0)])
    @pytest.mark.parametrize(
        ("version", "advice"), [(None, "install a CUDA build"), ("13.0", "nvidia-smi and CUDA_VISIBLE_DEVICES")]
    )
    def test_cuda_is_told_to_be_absent(self, monkeypatch, device, version, advice):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(DeviceError, match=rf"No CUDA for .*{advice}.*only 'cpu'"):
            parse_devices(device)

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("xpu:0", "This machine has no .*only 'cpu'"),
            (torch.device("mps"), "This machine has no .*only 'cpu'"),
            ("meta:0", r"meta.* have no values to train\..*only 'cpu'"),
            (torch.device("meta"), r"meta.* have no values to train\..*only 'cpu'"),
            ("gpu:0", r"'gpu:0' is no device name; 'cuda:0' is one\. .*only 'cpu'"),
        ],
    )
    def test_other_types_are_absent(self, name, words):
        with pytest.raises(DeviceError, match=words):
            parse_devices([name])


@pytest.mark.parametrize("name", ["", "0", "GPU", "cuda1", "cuda:", "cuda:-1", "cuda:x", "cpu ", "cuda:0,1"])
@pytest.mark.usefixtures("three_gpus")
def test_unknown_name_says_what_there_is(name):
    with pytest.raises(DeviceError, match=r"is no device name.*'cpu' and 3 of 'cuda'") as caught:
        parse_devices([name])
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("wrong", [True, [0, False], 1.5, [0, 1.0], [None], [b"cuda"], object(), [["cuda:0"]], [{}]])
@pytest.mark.usefixtures("three_gpus")
def test_wrong_type(wrong):
    with pytest.raises(DeviceError, match=r"is no device\. Pass an int, a str or a torch\.device"):
        parse_devices(wrong)


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

    @pytest.mark.parametrize(
        ("device_ids", "words"),
        [
            ([0, 3], r"cuda has 3 here\. Use 0 to 2"),
            ([0, -1], r"cuda has 3 here\. Use 0 to 2"),
            (["cuda:300"], r"cuda has 3 here\. Use 0 to 2"),
            ([torch.device("cuda:44")], r"cuda has 3 here\. Use 0 to 2"),
            ([0, 0], "device_ids names cuda:0 twice"),
            ([1, 0, torch.device("cuda:1")], "device_ids names cuda:1 twice"),
            (["cuda", 1], "device_ids names cuda:1 twice"),
            (["cpu", 0], "device_ids mixes cpu and cuda"),
            ([], "device_ids is empty"),
            (range(0), "device_ids is empty"),
            ("mps", "This machine has no 'mps'"),
        ],
    )
    def test_what_is_refused(self, device_ids, words):
        with pytest.raises(DeviceError, match=words):
            parse_devices(device_ids)

    def test_cpu_replicas_are_still_possible(self):
        assert parse_devices(["cpu", "cpu"]) == [CPU, CPU]


@pytest.mark.parametrize("device_ids", [None, "mps", ["mps:0"], [torch.device("mps")]])
def test_mps_has_an_index(machine, device_ids):
    machine("mps", 1)
    assert parse_devices(device_ids) == [torch.device("mps", 0)]
    with pytest.raises(DeviceError, match=r"No device 'mps:1': mps has 1 here. Use 0,"):
        parse_devices("mps:1")
    with pytest.raises(DeviceError, match="No CUDA for the device 0"):
        parse_devices([0])


def test_naming_the_cpu_asks_no_driver(monkeypatch):
    def fail(*args, **kwargs):
        pytest.fail("the machine was asked for its accelerators")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", fail)
    assert parse_devices(["cpu", "cpu:0", CPU]) == [CPU] * 3
    assert parse_device("cpu") == CPU


def test_accelerator_of_another_make_is_known_by_its_own_name(machine):
    machine("hpu", 2)
    assert parse_devices(["hpu:1", "hpu:0"]) == [torch.device("hpu", 1), torch.device("hpu", 0)]


@pytest.mark.gpu
def test_real_devices():
    count = torch.cuda.device_count()
    assert parse_devices(None) == cuda(*range(count))
    assert parse_devices("cuda") == cuda(torch.cuda.current_device())
    with pytest.raises(DeviceError, match=f"has {count} here"):
        parse_devices([count])
    for device in parse_devices(None):
        assert torch.zeros(1, device=device).device == device
