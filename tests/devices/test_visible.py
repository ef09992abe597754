"""The driver's rules for the variables that hide devices, and the match of torch's devices to NVML's."""

import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import everygpu
from everygpu.devices import visible
from everygpu.devices.visible import (
    pick_visible,
    predict_names,
    resolve_environ,
    visible_devices,
)
from tests.devices.fake_nvml import GIB, H200_UUIDS, FakeNvml, Gpu, make_sample, two_h200s
from tests.devices.real_gpus import find_gpus
from tests.source import say_again

A, B = H200_UUIDS
# What cuDeviceGetCount and cuDeviceGetUuid answered on two H200s, driver 580.159, for each value.
RECORDED = {
    "0,1": [0, 1],
    "1,0": [1, 0],
    "": [],
    "-1": [],
    "0,2,1": [0],
    "0,0": [],
    "0,-1,0": [0],
    "1gpu,0x": [1, 0],
    " 1 , 0 ": [1, 0],
    "0 1": [0],
    "+1": [1],
    "0,,1": [0],
    ",0": [],
    A: [0],
    "GPU-": [],
    A[:9]: [0],
    "GPU-" + A[4:].upper(): [0],
    A.lower(): [],
    f"{B},0": [1],
    f"0,{B}": [0],
    f"{A},{A}": [],
    f"{A},GPU-": [0],
    f"{A},{A[:9]}": [],
    f"{B},no,{A}": [1],
    "MIG-x": [],
    f"0,MIG-{B}": [0],
    f" {A}": [],
    f"{A} ,{B}": [0, 1],
    f"{A}, {B}": [0],
    A[4:]: [],
    "GPU-zz,0": [],
    # The rules alone say so.
    "9" * 5000: [],
    "0," + "9" * 5000: [0],
    "0" * 5000 + "1": [1],
}


@pytest.mark.parametrize("text", RECORDED, ids=lambda text: text[:80])
def test_same_as_the_driver(text):
    assert pick_visible(text, H200_UUIDS) == RECORDED[text]


@pytest.mark.parametrize(
    ("environ", "warns"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1"}, True),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, True),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, False),
        ({"CUDA_VISIBLE_DEVICES": make_sample(1).uuid}, False),
        ({}, False),
    ],
)
def test_indices_on_a_box_of_unlike_gpus_are_told_to_be_uncertain(environ, warns, caplog):
    box = [make_sample(0, name="NVIDIA T400"), make_sample(1)]
    resolve_environ(environ, box)
    assert ("CUDA_DEVICE_ORDER" in caplog.text) == warns
    caplog.clear()
    resolve_environ(environ, [make_sample(0), make_sample(1)])
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("names", "environ", "expected"),
    [
        ("AA", {}, {0: "cuda:0", 1: "cuda:1"}),
        ("AA", {"CUDA_VISIBLE_DEVICES": "1"}, {1: "cuda:0"}),
        ("AB", {}, {0: "cuda:?", 1: "cuda:?"}),
        ("AB", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, {0: "cuda:0", 1: "cuda:1"}),
        ("AB", {"CUDA_VISIBLE_DEVICES": f"{make_sample(1).uuid},{make_sample(0).uuid}"}, {1: "cuda:0", 0: "cuda:1"}),
    ],
)
def test_torchs_names_are_predicted_where_the_order_is_known(names, environ, expected):
    box = [make_sample(i, name=name) for i, name in enumerate(names)]
    assert predict_names(environ, box) == {box[i].uuid: name for i, name in expected.items()}


@pytest.fixture
def fake_cuda(monkeypatch):
    """Make torch report devices by UUID, in the order given, and NVML the two H200s (or nothing)."""

    def install(uuids, library):
        properties = [SimpleNamespace(uuid=uuid, name="NVIDIA H200") for uuid in uuids]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index])
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (5 + device.index, 9))
        monkeypatch.setitem(sys.modules, "pynvml", library)  # None makes import raise ImportError

    return install


def test_logical_devices_get_the_numbers_of_their_physical_ones(fake_cuda):
    fake_cuda([B[4:], A[4:]], FakeNvml(*two_h200s(used=39 * GIB, utilization=50, processes=[(7, GIB)])))
    first, second = visible_devices()
    assert (first.device, second.device) == (torch.device("cuda:0"), torch.device("cuda:1"))
    assert (first.index, second.index) == (1, 0)
    assert (first.uuid, first.free_memory_bytes, first.total_memory_bytes) == (B, 100 * GIB, 140 * GIB)
    assert (first.utilization_pct, first.processes) == (50.0, ((7, GIB),))
    assert first.label == "cuda:0 (GPU 1)"


def test_without_nvml_torch_tells_what_it_knows(fake_cuda):
    fake_cuda([A[4:], B[4:]], None)
    devices = visible_devices()
    assert [d.free_memory_bytes for d in devices] == [5, 6]
    assert devices[1].uuid == B
    assert devices[1].index is None
    assert devices[1].utilization_pct is None
    assert devices[1].label == "cuda:1"


def test_memory_that_nvml_does_not_know_is_asked_of_torch(fake_cuda):
    fake_cuda([A[4:]], FakeNvml(Gpu(total=None)))
    (device,) = visible_devices()
    assert (device.index, device.free_memory_bytes, device.total_memory_bytes) == (0, 5, 9)


def test_an_instance_has_a_uuid_of_its_kind(fake_cuda):
    gpu = Gpu(uuid=B, mig=True, instances=[f"MIG-{A[4:]}"])
    fake_cuda([A[4:]], FakeNvml(gpu))
    (device,) = visible_devices()
    assert (device.uuid, device.free_memory_bytes) == (f"MIG-{A[4:]}", 5)


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_other_accelerator_is_one_device_whose_memory_may_be_unknown(monkeypatch, error):
    def refuse(device):
        raise error("not on this backend")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuse)
    (device,) = visible_devices()
    assert (device.device, device.name, device.label) == (torch.device("mps"), "MPS", "mps")
    assert device.index is device.uuid is device.free_memory_bytes is None


@pytest.mark.parametrize(
    ("library", "text", "level"),
    [
        (FakeNvml(fail_init=FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED), None, logging.INFO),
        (FakeNvml(*two_h200s()), "-1", logging.INFO),
        (FakeNvml(*two_h200s()), None, logging.WARNING),
        (FakeNvml(*two_h200s()), "1", logging.WARNING),
    ],
)
def test_training_on_the_cpu_is_said_once(monkeypatch, caplog, library, text, level):
    caplog.set_level(logging.INFO, logger="everygpu")
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    say_again(visible)
    everygpu.DataParallel(torch.nn.Linear(1, 1), ["cpu"])  # which is what was asked for
    assert caplog.records == []
    for _ in range(2):
        everygpu.DataParallel(torch.nn.Linear(1, 1))
    (record,) = caplog.records
    assert record.levelno == level
    assert "sees no GPU" in record.message
    say_again(visible)


def test_choosing_devices_does_not_load_torch():
    code = (
        "import sys, everygpu.devices.select, everygpu.devices.nvml, everygpu.devices.visible, everygpu.cli;"
        "everygpu.devices.nvml.sample_devices();"
        "assert 'torch' not in sys.modules, 'torch was loaded';"
        "assert 'numpy' not in sys.modules, 'numpy was loaded'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_real_devices_match_and_need_no_context():
    devices = visible_devices()
    assert len(devices) == torch.cuda.device_count()
    assert len({device.index for device in devices}) == len(devices)
    for device in devices:
        properties = torch.cuda.get_device_properties(device.device)
        assert (device.uuid, device.name) == (f"GPU-{properties.uuid}", properties.name)
        assert 0 < device.free_memory_bytes <= device.total_memory_bytes


COMPARE = """
import json, torch
from everygpu.devices import visible_devices
ours = [[device.device.index, device.index, device.uuid] for device in visible_devices()]
ask = torch.cuda.get_device_properties
print(json.dumps([ours, [f"GPU-{ask(i).uuid}" for i in range(torch.cuda.device_count())]]))
"""


@pytest.mark.gpu
def test_real_driver_numbers_devices_as_the_rules_say():
    samples = find_gpus(2)
    last = len(samples) - 1
    for text in (f"{last},0", "0,0", "1,-1,0", samples[1].uuid, samples[1].uuid[:13], "0,,1", "-1", ""):
        environ = {"CUDA_VISIBLE_DEVICES": text, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        expected = resolve_environ(environ, samples)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", COMPARE],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            check=True,
        )
        ours, torchs = json.loads(done.stdout)
        assert torchs == [sample.uuid for sample in expected], text
        assert ours == [[i, sample.index, sample.uuid] for i, sample in enumerate(expected)], text
