"""Each check on facts of sound and unsound machines, and limits and variables at the limits."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from everygpu.devices import doctor
from everygpu.devices.doctor import TorchBuild
from everygpu.devices.nvml import DriverSample, NvmlFailure
from everygpu.devices.p2p import Outcome, PairReport
from tests.devices.fake_nvml import GIB, make_sample

DRIVER = DriverSample(version="580.159.03", cuda_version=(13, 0))
ABSENT = NvmlFailure(is_absent=True, text="Driver Not Loaded")
BROKEN = NvmlFailure(is_absent=False, text="Driver/library version mismatch")
BUILD = TorchBuild(
    version="2.13.0+cu130",
    cuda_version=(13, 0),
    is_rocm=False,
    num_devices=2,
    architectures=("sm_75", "sm_80", "sm_90", "sm_100", "compute_120"),
    capabilities=((9, 0), (9, 0)),
    nccl_version=(2, 29, 3),
)
CPU_BUILD = replace(
    BUILD, version="2.13.0+cpu", cuda_version=None, num_devices=0, architectures=(), capabilities=(), nccl_version=None
)
RIGHT = PairReport(verdict="right")


@pytest.mark.parametrize(
    ("driver", "num_boards", "state", "words"),
    [
        (DRIVER, 2, "ok", "580.159.03, for CUDA up to 13.0"),
        (replace(DRIVER, cuda_version=None), 2, "ok", "580.159.03"),
        (BROKEN, 2, "error", "mismatch"),
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
        ({"cuda_version": (12, 8)}, DRIVER, {}, "ok", "12.8"),
        ({"cuda_version": (13, 2)}, DRIVER, {}, "ok", "13.2"),
        ({"cuda_version": (14, 0)}, DRIVER, {}, "error", "built for CUDA 14.0, the driver serves 13.0"),
        ({"cuda_version": (14, 0)}, replace(DRIVER, cuda_version=None), {}, "ok", "14.0"),
        ({"num_devices": 0}, DRIVER, {}, "error", "torch sees no GPU, and the driver does"),
        ({"num_devices": 0}, DRIVER, {"CUDA_VISIBLE_DEVICES": "9"}, "warning", "CUDA_VISIBLE_DEVICES='9'"),
        ({"num_devices": 0}, DRIVER, {"CUDA_VISIBLE_DEVICES": ""}, "warning", "CUDA_VISIBLE_DEVICES=''"),
        ({"cuda_version": None, "num_devices": 0}, DRIVER, {}, "error", "built without CUDA"),
        ({"cuda_version": None, "num_devices": 0}, ABSENT, {}, "ok", "no CUDA sees 0 GPU(s)"),
        ({"cuda_version": None, "is_rocm": True}, ABSENT, {}, "ok", "ROCm sees 2 GPU(s)"),
    ],
)
def test_torch(changes, driver, environ, state, words):
    finding, *_ = doctor.check_torch(replace(BUILD, **changes), driver, environ)
    assert finding.state == state
    assert words in finding.message
    assert (finding.fix is not None) == (state != "ok")


@pytest.mark.parametrize(
    ("capability", "fits"),
    [
        ((9, 0), True),
        ((8, 6), True),  # kernels for 8.0 run on all of 8.x
        ((7, 0), False),  # those for 7.5 do not run on 7.0
        ((6, 1), False),
        ((10, 3), True),
        ((11, 0), False),
        ((12, 1), True),  # compiled for it when they are loaded
        ((13, 0), True),
    ],
)
def test_architectures(capability, fits):
    assert lacking(capabilities=((9, 0), capability, capability)) == ([] if fits else [capability])


def lacking(**changes):
    """The compute capabilities that torch has no kernels for."""
    words = [f.message.split() for f in doctor.check_torch(replace(BUILD, **changes), DRIVER, {}) if f.state == "error"]
    return [tuple(map(int, word[-1].split("."))) for word in words]


def test_architectures_with_letters_and_of_other_makers():
    assert lacking(architectures=("sm_90a", "sm_120f")) == []
    assert lacking(architectures=("gfx942",), is_rocm=True) == []


def test_nccl():
    def states(**changes):
        return [f.state for f in doctor.check_torch(replace(BUILD, **changes), DRIVER, {}) if f.check == "nccl"]

    assert states() == ["ok"]
    assert states(nccl_version=None) == ["note"]
    assert states(num_devices=1, nccl_version=None) == []


def test_health():
    hot = make_sample(1, slowdowns=("power brake",), temperature_c=91.0)
    (sound,) = doctor.check_health([make_sample(0), make_sample(1)])
    assert (sound.state, sound.message) == ("ok", "2 GPU(s), none is slowed")
    (warned,) = doctor.check_health([make_sample(0), hot])
    assert (warned.state, warned.message) == ("warning", "GPU 1 is slowed: power brake, at 91 °C")
    assert list(doctor.check_health([])) == []


@pytest.mark.parametrize(
    ("types", "num_devices", "noted"),
    [
        (["DMA", "identity"], 2, True),
        (["DMA-FQ"], 8, True),
        (["identity", "identity"], 2, False),
        ([], 2, False),
        (["DMA"], 1, False),
    ],
)
def test_iommu(types, num_devices, noted):
    findings = doctor.check_iommu(types, num_devices)
    assert [finding.state for finding in findings] == ["note"] * noted


def outcome(**changed):
    """Make an outcome of three GPUs: ``outcome(_01=...)`` changes a pair."""
    pairs = {(i, j): replace(RIGHT, gigabytes_per_s=390.0 + i) for i in range(3) for j in range(3) if i != j}
    return Outcome(pairs=pairs | {(int(name[1]), int(name[2])): report for name, report in changed.items()})


def test_peers_that_are_right():
    (finding,) = doctor.check_peers(outcome())
    assert (finding.state, finding.message) == ("ok", "copies of 6 of 6 pairs arrive right, at 390 to 392 GB/s")
    assert list(doctor.check_peers(None)) == []


def test_peers_that_are_not():
    wrong, hangs = PairReport(verdict="wrong", detail="bfloat16 by a kernel"), PairReport(verdict="hangs")
    findings = list(doctor.check_peers(outcome(_01=wrong, _02=hangs, _20=hangs, _12=PairReport(verdict="untested"))))
    assert [finding.state for finding in findings] == ["warning", "warning", "note", "ok"]
    assert "arrive wrong between 0>1 (bfloat16 by a kernel)" in findings[0].message
    assert "hang between 0>2, 2>0" in findings[1].message
    assert "1>2" in findings[2].message
    assert "2 of 6 pairs" in findings[3].message


def test_many_broken_pairs_are_counted():
    pairs = dict.fromkeys(outcome().pairs, PairReport(verdict="hangs"))
    (finding,) = doctor.check_peers(Outcome(pairs=pairs))
    assert "0>1, 0>2, 1>0 and 3 more" in finding.message


@pytest.mark.parametrize(
    ("verdict", "state", "words"),
    [("right", "ok", "is right"), ("wrong", "warning", "is wrong (x)"), ("hangs", "warning", "hangs (x)")],
)
def test_collective(verdict, state, words):
    report = PairReport(verdict=verdict, detail="" if verdict == "right" else "x")
    *_, finding = doctor.check_peers(replace(outcome(), collective=report))
    assert (finding.check, finding.state) == ("nccl", state)
    assert finding.message.endswith(words)


@pytest.mark.parametrize(
    ("environ", "states"),
    [
        ({}, []),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, ["warning"]),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, []),
        ({"CUDA_LAUNCH_BLOCKING": ""}, []),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, ["warning"]),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO"}, ["note", "note"]),
        ({"NCCL_DEBUG": "WARN"}, []),
        ({"EVERYGPU_P2P": "staged"}, ["note"]),
        ({"EVERYGPU_P2P": "trust"}, ["note"]),
        ({"EVERYGPU_P2P": "test"}, []),
    ],
)
def test_variables(environ, states):
    findings = list(doctor.check_environment(environ, []))
    assert [finding.state for finding in findings] == states
    assert all(finding.fix for finding in findings)
    assert all(f"{name}={environ[name]}" in finding.message for name, finding in zip(environ, findings))


@pytest.mark.parametrize(
    ("names", "environ", "noted"),
    [
        (["A", "A"], {}, False),
        (["A", "B"], {}, True),
        (["A", "B"], {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, True),
        (["A", "B"], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, False),
        ([], {}, False),
    ],
)
def test_order(names, environ, noted):
    findings = doctor.check_environment(environ, [make_sample(i, name=name) for i, name in enumerate(names)])
    assert [finding.state for finding in findings] == ["note"] * noted


@pytest.mark.parametrize(("total", "state"), [(64 * 2**20, "warning"), (GIB, "ok")])
def test_shared_memory(monkeypatch, tmp_path, total, state):
    (tmp_path / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(total=total))
    finding = next(iter(doctor.check_limits(tmp_path)))
    assert (finding.state, "--shm-size" in (finding.fix or "")) == (state, state == "warning")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
@pytest.mark.parametrize(("limit", "state"), [(1024, "warning"), (4095, "warning"), (4096, "ok"), (-1, "ok")])
def test_open_files(monkeypatch, tmp_path, limit, state):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (limit, limit))
    (finding,) = doctor.check_limits(tmp_path)
    assert (finding.state, "ulimit -n" in (finding.fix or "")) == (state, state == "warning")
