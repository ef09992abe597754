"""Facts as they are gathered, what each check makes of them, and whole diagnoses of machines."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from everygpu.devices import doctor, p2p
from everygpu.devices.doctor import TorchBuild, count_boards, describe_torch, diagnose
from everygpu.devices.nvml import DriverSample, NvmlFailure
from everygpu.devices.p2p import PairReport
from tests.devices.fake_nvml import GIB, FakeNvml, Gpu, make_sample, two_h200s

DRIVER = DriverSample(version="580.159.03", cuda_version=(13, 0))
ABSENT = NvmlFailure(is_absent=True, text="Driver Not Loaded")
BROKEN = NvmlFailure(is_absent=False, text="Driver/library version mismatch")
BUILD = TorchBuild(version="2.13.0+cu130", cuda_version=(13, 0), is_rocm=False, num_devices=2, nccl_version=(2, 29, 3))
CPU_BUILD = replace(BUILD, version="2.13.0+cpu", cuda_version=None, num_devices=0, nccl_version=None)
RIGHT, HANGS = PairReport(verdict="right"), PairReport(verdict="hangs")
WRONG = PairReport(verdict="wrong", detail="4104 bytes by a kernel")


@pytest.mark.parametrize(
    ("driver", "num_boards", "state", "words"),
    [
        (DRIVER, 2, "ok", "580.159.03, for CUDA up to 13.0"),
        (replace(DRIVER, cuda_version=None), 2, "ok", "580.159.03"),
        (BROKEN, 0, "error", "mismatch"),
        (ABSENT, 2, "error", "2 NVIDIA GPU(s) without a driver"),
        (ABSENT, 0, "note", "Driver Not Loaded"),
    ],
)
def test_driver(driver, num_boards, state, words):
    finding = doctor.check_driver(driver, num_boards)
    assert finding.state == state
    assert words in finding.message
    assert (finding.fix is not None) == (state == "error")


@pytest.mark.parametrize(
    ("changes", "driver", "environ", "state", "words"),
    [
        ({}, DRIVER, {}, "ok", "CUDA 13.0 sees 2 GPU(s)"),
        ({"cuda_version": (13, 2)}, DRIVER, {}, "ok", "13.2"),
        ({"cuda_version": (14, 0)}, DRIVER, {}, "error", "built for CUDA 14.0, the driver serves 13.0"),
        ({"cuda_version": (14, 0)}, replace(DRIVER, cuda_version=None), {}, "ok", "14.0"),
        ({"num_devices": 0}, DRIVER, {}, "error", "torch sees no GPU, and the driver does"),
        ({"num_devices": 0}, DRIVER, {"CUDA_VISIBLE_DEVICES": "9"}, "warning", "CUDA_VISIBLE_DEVICES='9'"),
        ({"cuda_version": None, "num_devices": 0}, DRIVER, {}, "error", "built without CUDA"),
        ({"cuda_version": None, "num_devices": 0}, ABSENT, {}, "note", "2.13.0+cu130 is built without CUDA"),
        ({"cuda_version": None, "is_rocm": True}, ABSENT, {}, "ok", "ROCm sees 2 GPU(s)"),
    ],
)
def test_torch(changes, driver, environ, state, words):
    finding, *_ = doctor.check_torch(replace(BUILD, **changes), driver, environ)
    assert finding.state == state
    assert words in finding.message
    assert (finding.fix is not None) == (state != "ok")


@pytest.mark.parametrize(
    ("changes", "states"), [({}, ["ok"]), ({"nccl_version": None}, ["note"]), ({"num_devices": 1}, [])]
)
def test_nccl(changes, states):
    found = doctor.check_torch(replace(BUILD, **changes), DRIVER, {})
    assert [f.state for f in found if f.check == "nccl"] == states


def test_health():
    hot = make_sample(1, slowdowns=("power brake",), temperature_c=91.0)
    (sound,) = doctor.check_health([make_sample(0), make_sample(1)])
    assert (sound.state, sound.message) == ("ok", "2 GPU(s), none is slowed")
    (warned,) = doctor.check_health([make_sample(0), hot])
    assert (warned.state, warned.message) == ("warning", "GPU 1 is slowed: power brake, at 91 °C")
    assert list(doctor.check_health([])) == []


def peers(**changed):
    """Make reports of three GPUs: ``peers(_01=...)`` changes a pair."""
    pairs = {(i, j): RIGHT for i in range(3) for j in range(3) if i != j}
    return pairs | {(int(name[1]), int(name[2])): report for name, report in changed.items()}


def test_copies_that_are_right():
    (finding,) = doctor.check_peers(peers())
    assert (finding.state, finding.message) == ("ok", "copies of 6 of 6 pairs arrive right")
    assert list(doctor.check_peers(None)) == []


def test_copies_that_are_not():
    findings = list(doctor.check_peers(peers(_01=WRONG, _02=HANGS, _20=HANGS, _12=PairReport(verdict="untested"))))
    assert [finding.state for finding in findings] == ["warning", "warning", "note", "ok"]
    assert "arrive wrong between 0>1 (4104 bytes by a kernel)" in findings[0].message
    assert "hang between 0>2, 2>0" in findings[1].message
    assert "1>2" in findings[2].message
    assert "2 of 6 pairs" in findings[3].message
    (finding,) = doctor.check_peers(dict.fromkeys(peers(), HANGS))
    assert "0>1, 0>2, 1>0 and 3 more" in finding.message


@pytest.mark.parametrize(
    ("environ", "names", "states"),
    [
        ({}, "AA", []),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "", ["warning"]),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, "", []),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "", ["warning"]),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO"}, "", ["note", "note"]),
        ({"NCCL_DEBUG": "WARN"}, "", []),
        ({"EVERYGPU_P2P": "staged"}, "", ["note"]),
        ({"EVERYGPU_P2P": "test"}, "", []),
        ({}, "AB", ["note"]),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "AB", []),
    ],
)
def test_environment(environ, names, states):
    findings = list(doctor.check_environment(environ, [make_sample(i, name=name) for i, name in enumerate(names)]))
    assert [finding.state for finding in findings] == states
    assert all(finding.fix for finding in findings)


@pytest.mark.parametrize(("free", "state"), [(64 * 2**20, "warning"), (GIB, "ok")])
def test_shared_memory(monkeypatch, tmp_path, free, state):
    (tmp_path / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(total=64 * GIB, free=free))
    finding = next(iter(doctor.check_limits(tmp_path)))
    assert (finding.state, "--shm-size" in (finding.fix or "")) == (state, state == "warning")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
@pytest.mark.parametrize(("limit", "state"), [(4095, "warning"), (4096, "ok"), (-1, "ok")])
def test_open_files(monkeypatch, tmp_path, limit, state):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (limit, limit))
    (finding,) = doctor.check_limits(tmp_path)
    assert (finding.state, "ulimit -n" in (finding.fix or "")) == (state, state == "warning")


@pytest.fixture
def system(tmp_path):
    """The files of a machine with two NVIDIA GPUs, one of AMD's, and a sound device."""
    rows = [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x040300"), ("0x1002", "0x030000")]
    for number, (vendor, kind) in enumerate(rows):
        folder = tmp_path / f"sys/bus/pci/devices/0000:00:0{number}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    return tmp_path


def test_facts_of_this_machine(system, tmp_path):
    assert count_boards(system) == 2
    assert count_boards(tmp_path / "nowhere") == 0
    build = describe_torch()
    assert (build.version, build.num_devices) == (torch.__version__, torch.cuda.device_count())
    assert (build.cuda_version is None) == (torch.version.cuda is None)


@pytest.fixture
def examine(monkeypatch, tmp_path):
    """Diagnose a machine made up of a driver, a build of torch, and what copying between its GPUs gives."""

    def run(library, build, *, environ=None, found=None, system=tmp_path, **options):
        tests = []

        def test(uuids):
            tests.append(uuids)
            return found or {(0, 1): RIGHT, (1, 0): RIGHT}

        monkeypatch.setitem(sys.modules, "pynvml", library)
        monkeypatch.setattr(doctor, "describe_torch", lambda: build)
        monkeypatch.setattr(p2p, "list_uuids", lambda: ["u0", "u1"])
        monkeypatch.setattr(p2p, "examine_and_keep", test)
        diagnosis = diagnose(environ or {}, system=system, **options)
        return diagnosis, {f.check: f.state for f in reversed(diagnosis.findings)}, tests

    return run


def test_sound_machine(examine):
    diagnosis, states, tests = examine(FakeNvml(*two_h200s()), BUILD, environ={"CUDA_LAUNCH_BLOCKING": "1"})
    assert diagnosis.is_usable
    assert [states[check] for check in ("driver", "torch", "nccl", "P2P", "health")] == ["ok"] * 5
    assert states["environment"] == "warning"
    assert tests == [["u0", "u1"]]


def test_machine_without_gpus_is_usable(examine):
    library = FakeNvml(fail_init=FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    diagnosis, states, tests = examine(library, CPU_BUILD)
    assert diagnosis.is_usable
    assert (states["driver"], states["torch"]) == ("note", "note")
    assert (diagnosis.peers, tests) == (None, [])


@pytest.mark.parametrize(
    ("library", "build", "state"),
    [
        (FakeNvml(fail_init=FakeNvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH), replace(BUILD, num_devices=0), "error"),
        (FakeNvml(fail_init=FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED), CPU_BUILD, "error"),
        (FakeNvml(*two_h200s(), cuda_version=12_020), replace(BUILD, num_devices=0), "ok"),
    ],
    ids=["broken driver", "no driver", "old driver"],
)
def test_machines_that_are_unusable(examine, system, library, build, state):
    diagnosis, states, _ = examine(library, build, system=system)
    assert not diagnosis.is_usable
    assert states["driver"] == state


def test_one_gpu_and_a_quick_look_copy_nothing(examine):
    assert examine(FakeNvml(Gpu()), replace(BUILD, num_devices=1))[2] == []
    diagnosis, states, tests = examine(FakeNvml(*two_h200s()), BUILD, test_peers=False)
    assert (diagnosis.peers, tests) == (None, [])
    assert "P2P" not in states


@pytest.mark.gpu
@pytest.mark.alone
def test_real_machine_is_sound(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    diagnosis = diagnose({})
    assert diagnosis.is_usable, diagnosis.findings
    assert all(report == RIGHT for report in (diagnosis.peers or {}).values())
