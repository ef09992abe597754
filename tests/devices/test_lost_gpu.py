"""Each query of NVML with each of its errors, on each of three GPUs: what all that asks makes of the machine."""

import itertools
import json
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from everygpu.cli import main
from everygpu.cli.choose import NO_GPU, plan_run
from everygpu.devices import doctor, nvml
from everygpu.devices.doctor import TorchBuild, diagnose
from everygpu.devices.select import Demand, select_devices
from everygpu.errors import DeviceError
from tests.devices.fake_nvml import GIB, FakeNvml, Gpu

UUIDS = [f"GPU-{digit * 8}-0df6-c9f7-a45c-22c4343803ae" for digit in "abc"]
IDENTITY = ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetName")
FIGURES = (
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMigMode",
)
DRIVER = (
    "nvmlInit",
    "nvmlShutdown",
    "nvmlDeviceGetCount",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlSystemGetProcessName",
)
ERRORS = (*range(1, 31), 999)
FATAL_CUDA_ERRORS = (FakeNvml.NVML_ERROR_GPU_IS_LOST, FakeNvml.NVML_ERROR_RESET_REQUIRED)
CASES = [
    *itertools.product(IDENTITY + FIGURES, ERRORS, range(3)),
    *itertools.product(DRIVER, ERRORS, [None]),
]
BUILD = TorchBuild(version="2.13.0", cuda_version=(13, 0), is_rocm=False, num_devices=3, nccl_version=None)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Three GPUs, of which the first has least memory free, and torch that sees what CUDA answers for."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def memory(device):
        if device.index == machine.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return 5 * GIB, 9 * GIB

    def install(call, error, position):
        gpus = [Gpu(uuid=uuid, used=(30 - 10 * i) * GIB, processes=[(7, GIB)]) for i, uuid in enumerate(UUIDS)]
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*gpus, faults={(call, position): error}))
        is_foreign = call in IDENTITY and error == FakeNvml.NVML_ERROR_NO_PERMISSION
        machine.lost = position if not is_foreign and (call in IDENTITY or error in FATAL_CUDA_ERRORS) else None
        machine.left = [i for i in range(3) if not is_foreign or i != position]
        machine.sound = [i for i in machine.left if i != machine.lost]
        return machine

    machine = SimpleNamespace(install=install)
    monkeypatch.setattr(doctor, "describe_torch", lambda: BUILD)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid=UUIDS[d.index][4:], name="H")
    )
    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory)
    return machine


def chosen(environ, **demand):
    """Return the positions that ``everygpu run`` takes; None for the CPU by a word of its own."""
    try:
        plan = plan_run(Demand(**demand), environ, share=True)
    except DeviceError:
        return []
    if plan.environ in ({}, NO_GPU):
        return None
    return [UUIDS.index(uuid) for uuid in plan.environ["CUDA_VISIBLE_DEVICES"].split(",")]


def check_choices(machine):
    """Positions are nvidia-smi's, as CUDA has them: no GPU takes the place of another."""
    samples = nvml.sample_devices() or []
    for place, gpu in enumerate(samples):
        position = machine.left[place]
        expected = [position] if position in machine.sound else None
        assert chosen({"CUDA_VISIBLE_DEVICES": str(place)}) == expected
        assert chosen({"CUDA_VISIBLE_DEVICES": str(place)}, count=1) == (expected or [])
        assert chosen({}, indices=(position,)) == (expected or [])
        assert (gpu.index, gpu.fault is None) == (position, position in machine.sound)
        assert gpu.uuid in ({UUIDS[position]} if gpu.fault is None else {UUIDS[position], None})
    return samples


def check_commands(machine, samples, driver_answers):
    records = json.loads(invoke("devices", "--json").stdout)["devices"]
    assert sorted((r["index"], r["fault"] is None) for r in records) == [(g.index, g.fault is None) for g in samples]
    assert {r["uuid"] for r in records if r["fault"] is None} == {UUIDS[i] for i in machine.sound if samples}
    invoke("devices")
    invoke("devices", "--torch")
    diagnosis = diagnose({}, test_peers=False)
    errors = [finding for finding in diagnosis.findings if finding.check == "health" and finding.state == "error"]
    assert len(errors) == sum(gpu.fault is not None for gpu in samples)
    assert diagnosis.is_usable == (driver_answers and not errors)


def invoke(*arguments):
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    return done


def check_case(machine, call, error, position):
    machine.install(call, error, position)
    samples = check_choices(machine)
    assert len(samples) == (0 if call in ("nvmlInit", "nvmlDeviceGetCount") else len(machine.left))
    is_needed = call in ("nvmlInit", "nvmlDeviceGetCount", "nvmlSystemGetDriverVersion")
    is_broken = is_needed or (call == "nvmlSystemGetCudaDriverVersion" and error in FATAL_CUDA_ERRORS)
    is_absent = is_needed and error in (9, 12)
    check_commands(machine, samples, is_absent or not is_broken)
    visible = [i for i in range(3) if i != machine.lost]
    assert sorted(d.index for d in select_devices()) == visible
    with pytest.raises(DeviceError):
        select_devices(len(visible) + 1)


def test_some_errors(machine):
    for case in random.Random(0).sample(CASES, 40):
        check_case(machine, *case)


@pytest.mark.slow
@pytest.mark.parametrize("call", IDENTITY + FIGURES + DRIVER)
def test_every_error(machine, call):
    for case in CASES:
        if case[0] == call:
            check_case(machine, *case)
