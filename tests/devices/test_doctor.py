"""Facts as they are gathered, and whole diagnoses of machines."""

import sys
from dataclasses import replace

import pytest
import torch

from everygpu.devices import doctor, p2p
from everygpu.devices.doctor import count_boards, describe_torch, diagnose, read_iommu_types
from everygpu.devices.p2p import Outcome, PairReport
from tests.devices.fake_nvml import FakeNvml, Gpu, two_h200s
from tests.devices.test_checks import BUILD, CPU_BUILD


@pytest.fixture
def system(tmp_path):
    """The files of a machine with two NVIDIA GPUs, one of AMD's, and their IOMMU groups."""
    for name, vendor, kind in (
        ("0000:00:01.0", "0x10de", "0x030200"),
        ("0000:00:02.0", "0x10de", "0x030000"),
        ("0000:00:02.1", "0x10de", "0x040300"),  # its sound
        ("0000:00:03.0", "0x1002", "0x030000"),
    ):
        folder = tmp_path / "sys/bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    for group, kind in (("0", "identity"), ("1", "DMA")):
        folder = tmp_path / "sys/kernel/iommu_groups" / group
        folder.mkdir(parents=True)
        (folder / "type").write_text(f"{kind}\n")
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def test_facts_are_read_from_the_system(system):
    assert count_boards(system) == 2
    assert sorted(read_iommu_types(system)) == ["DMA", "identity"]


def test_system_without_such_files(tmp_path):
    assert count_boards(tmp_path) == 0
    assert read_iommu_types(tmp_path) == []


def test_torch_of_this_machine():
    build = describe_torch()
    assert build.version == torch.__version__
    assert build.num_devices == torch.cuda.device_count()
    assert (build.cuda_version is None) == (torch.version.cuda is None)


@pytest.fixture
def examine(monkeypatch, tmp_path):
    """Diagnose a machine made up of a driver, a build of torch, and what copying between its GPUs gives."""

    def run(library, build, *, environ=None, peers=None, system=tmp_path, **options):
        tests = []

        def test(uuids, *, full):
            tests.append((uuids, full))
            return peers or Outcome(pairs={(0, 1): PairReport(verdict="right"), (1, 0): PairReport(verdict="right")})

        monkeypatch.setitem(sys.modules, "pynvml", library)
        monkeypatch.setattr(doctor, "describe_torch", lambda: build)
        monkeypatch.setattr(p2p, "list_uuids", lambda: ["u0", "u1"])
        monkeypatch.setattr(p2p, "examine_and_keep", test)
        diagnosis = diagnose(environ or {}, system=system, **options)
        return diagnosis, {f.check: f.state for f in reversed(diagnosis.findings)}, tests

    return run


def test_sound_machine(examine):
    diagnosis, states, tests = examine(FakeNvml(*two_h200s()), BUILD)
    assert diagnosis.is_usable
    assert [states[check] for check in ("driver", "torch", "nccl", "P2P", "health")] == ["ok"] * 5
    assert tests == [(["u0", "u1"], True)]


def test_machine_without_gpus_is_usable(examine):
    library = FakeNvml(fail_init=FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    diagnosis, states, tests = examine(library, CPU_BUILD)
    assert diagnosis.is_usable
    assert (states["driver"], states["torch"]) == ("note", "ok")
    assert diagnosis.peers is None
    assert tests == []


def test_broken_driver_is_unusable(examine, system):
    library = FakeNvml(fail_init=FakeNvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    diagnosis, states, _ = examine(library, replace(BUILD, num_devices=0), system=system)
    assert not diagnosis.is_usable
    assert states["driver"] == "error"


def test_gpus_on_the_bus_without_a_driver_are_unusable(examine, system):
    library = FakeNvml(fail_init=FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED)
    diagnosis, states, _ = examine(library, CPU_BUILD, system=system)
    assert not diagnosis.is_usable
    assert states["driver"] == "error"


def test_old_driver_is_unusable(examine):
    diagnosis, states, _ = examine(FakeNvml(*two_h200s(), cuda_version=12_020), replace(BUILD, num_devices=0))
    assert not diagnosis.is_usable
    assert (states["driver"], states["torch"]) == ("ok", "error")


def test_wrong_copies_are_no_reason_not_to_use_the_gpus(examine, system):
    wrong = PairReport(verdict="wrong", detail="x")
    diagnosis, states, _ = examine(
        FakeNvml(*two_h200s()), BUILD, peers=Outcome(pairs={(0, 1): wrong, (1, 0): wrong}), system=system
    )
    assert diagnosis.is_usable
    assert (states["P2P"], states["iommu"]) == ("warning", "note")


def test_one_gpu_and_a_quick_look_copy_nothing(examine):
    one = replace(BUILD, num_devices=1, capabilities=((9, 0),))
    assert examine(FakeNvml(Gpu()), one)[2] == []
    diagnosis, states, tests = examine(FakeNvml(*two_h200s()), BUILD, test_peers=False)
    assert (diagnosis.peers, tests) == (None, [])
    assert "P2P" not in states


def test_environment_is_looked_at(examine):
    _, states, _ = examine(FakeNvml(*two_h200s()), BUILD, environ={"CUDA_LAUNCH_BLOCKING": "1"})
    assert states["environment"] == "warning"


@pytest.mark.gpu
@pytest.mark.alone
def test_real_machine_is_sound(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    diagnosis = diagnose({})
    assert diagnosis.is_usable, diagnosis.findings
    if diagnosis.peers is not None:
        assert {report.verdict for report in diagnosis.peers.pairs.values()} == {"right"}
        assert all(report.gigabytes_per_s > 1 for report in diagnosis.peers.pairs.values())
