"""What ``sample_devices`` makes of NVML's answers, good and bad."""

import logging
import sys

import pytest
import torch

from everygpu.devices import nvml
from everygpu.devices.nvml import DriverSample, NvmlFailure, name_processes, sample_devices, sample_driver
from tests.devices.fake_nvml import GIB, H200_UUIDS, FakeNvml, Gpu, two_h200s

NOT_FOUND, NOT_LOADED = FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND, FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED
MISMATCH = FakeNvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH


def test_gpus_in_pci_order_with_what_they_report():
    processes = [(4711, 8 * GIB), (4712, None)]
    busy = {"used": 3 * GIB, "utilization": 97, "processes": processes, "temperature": 88, "slowdowns": 4 | 0x20 | 0x80}
    first, second = sample_devices(FakeNvml(*two_h200s(**busy)))
    assert (first.index, second.index) == (0, 1)
    assert (first.uuid, second.uuid) == H200_UUIDS
    assert (first.name, first.utilization_pct, first.processes, first.is_mig) == ("NVIDIA H200", 0.0, (), False)
    assert first.label == "GPU 0"
    assert second.total_memory_bytes == 140 * GIB
    assert second.free_memory_bytes == 136 * GIB  # what the driver reserves is not free
    assert (second.utilization_pct, second.processes) == (97.0, ((4711, 8 * GIB), (4712, None)))
    assert second.temperature_c == 88.0
    assert second.slowdowns == ("software thermal slowdown", "power brake")


def test_what_a_gpu_does_not_report_is_none():
    (sample,) = sample_devices(FakeNvml(Gpu(name="NVIDIA GB10", total=None, utilization=None, temperature=None)))
    assert sample.name == "NVIDIA GB10"
    assert sample.total_memory_bytes is sample.free_memory_bytes is None
    assert sample.utilization_pct is sample.temperature_c is None


@pytest.mark.parametrize("idle_or_capped", [0, 1, 2, 4, None])
def test_idle_and_power_capped_clocks_are_no_slowdown(idle_or_capped):
    (sample,) = sample_devices(FakeNvml(Gpu(slowdowns=idle_or_capped)))
    assert sample.slowdowns == ()


def test_mig_mode_is_told():
    assert [sample.is_mig for sample in sample_devices(FakeNvml(Gpu(), Gpu(mig=True)))] == [False, True]


@pytest.mark.parametrize(
    ("code", "level"), [(NOT_FOUND, logging.DEBUG), (NOT_LOADED, logging.DEBUG), (MISMATCH, logging.WARNING)]
)
def test_absent_driver_is_told_quietly_and_a_broken_one_aloud(code, level, caplog):
    caplog.set_level(logging.DEBUG, logger="everygpu")
    assert sample_devices(FakeNvml(fail_init=code)) is None
    (record,) = caplog.records
    assert record.levelno == level
    assert "NVML" in record.message
    assert sample_driver(FakeNvml(fail_init=code)) == NvmlFailure(
        is_absent=level == logging.DEBUG, text=f"NVML error {code}"
    )


def test_the_package_is_asked_by_default_and_may_be_missing(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*two_h200s()))
    assert len(sample_devices()) == 2
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes import raise ImportError
    assert sample_devices() is None
    assert "nvidia-ml-py" in caplog.text
    assert "nvidia-ml-py" in sample_driver().text
    assert name_processes([7]) == {}


def test_driver_and_the_cuda_it_serves():
    library = FakeNvml(cuda_version=12_080)
    assert sample_driver(library) == DriverSample(version="580.159.03", cuda_version=(12, 8))
    assert sample_driver(FakeNvml(cuda_version=None)).cuda_version is None
    assert library.num_open == 0


def test_names_of_processes_that_may_be_known():
    assert name_processes([7, 9, 4711], FakeNvml()) == {7: "/usr/bin/python3", 4711: "python"}
    assert name_processes([7], FakeNvml(process_names={7: b"/opt/caf\xe9/python"})) == {7: "/opt/caf\\xe9/python"}
    assert name_processes([7], FakeNvml(fail_init=9)) == {}


@pytest.mark.gpu
@pytest.mark.alone
def test_real_nvml_agrees_with_torch():
    assert sample_driver().cuda_version >= (11, 0)
    by_uuid = {sample.uuid: sample for sample in nvml.sample_devices()}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        sample = by_uuid[f"GPU-{properties.uuid}"]
        assert sample.name == properties.name
        # CUDA leaves out what the driver reserves.
        assert 0.9 * sample.total_memory_bytes < properties.total_memory <= sample.total_memory_bytes
        assert 0 < sample.free_memory_bytes <= sample.total_memory_bytes
        assert sample.utilization_pct is None or 0 <= sample.utilization_pct <= 100
        assert 0 < sample.temperature_c < 110
