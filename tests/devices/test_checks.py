"""Each check on facts of sound and unsound machines."""

from dataclasses import replace

import pytest

from everygpu.devices import checks
from everygpu.devices.checks import TorchBuild
from everygpu.devices.nvml import DriverSample, NvmlFailure
from everygpu.devices.peer_run import Outcome, PairReport
from tests.devices.fake_nvml import make_sample

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
        (ABSENT, 2, "error", "2 NVIDIA GPU(s) on the PCI bus"),
        (ABSENT, 0, "note", "Driver Not Loaded"),
    ],
)
def test_driver(driver, num_boards, state, words):
    finding = checks.check_driver(driver, num_boards)
    assert finding.state == state
    assert words in finding.message
    assert (finding.fix is not None) == (state == "error")


@pytest.mark.parametrize(
    ("changes", "driver", "environ", "state", "words"),
    [
        ({}, DRIVER, {}, "ok", "CUDA 13.0 sees 2 GPU(s)"),
        ({"cuda_version": (12, 8)}, DRIVER, {}, "ok", "12.8"),
        ({"cuda_version": (13, 2)}, DRIVER, {}, "ok", "13.2"),
        ({"cuda_version": (14, 0)}, DRIVER, {}, "error", "built for CUDA 14.0, the driver serves 13.0 at most"),
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
    finding = checks.check_torch(replace(BUILD, **changes), driver, environ)
    assert finding.state == state
    assert words in finding.message
    assert (finding.fix is not None) == (state != "ok")


@pytest.mark.parametrize(
    ("cuda_version", "driver", "noted"),
    [
        ((13, 0), DRIVER, False),
        ((12, 9), DRIVER, False),
        ((13, 2), DRIVER, True),
        ((14, 0), DRIVER, False),
        ((13, 2), ABSENT, False),
        (None, DRIVER, False),
    ],
)
def test_minor_version(cuda_version, driver, noted):
    findings = checks.check_minor_version(replace(BUILD, cuda_version=cuda_version), driver)
    assert [finding.state for finding in findings] == ["note"] * noted


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
    findings = checks.check_architectures(replace(BUILD, capabilities=((9, 0), capability, capability)))
    assert [finding.state for finding in findings] == ([] if fits else ["error"])
    if not fits:
        assert f"capability {capability[0]}.{capability[1]}" in findings[0].message


def test_architectures_with_letters_and_none():
    assert checks.check_architectures(replace(BUILD, architectures=("sm_90a", "sm_120f"))) == []
    assert checks.check_architectures(replace(BUILD, architectures=())) == []
    assert checks.check_architectures(replace(BUILD, architectures=("gfx942",), is_rocm=True)) == []


def test_nccl():
    (found,) = checks.check_nccl(BUILD)
    assert (found.state, found.message) == ("ok", "NCCL 2.29.3")
    (lacking,) = checks.check_nccl(replace(BUILD, nccl_version=None))
    assert lacking.state == "note"
    assert checks.check_nccl(replace(BUILD, num_devices=1, nccl_version=None)) == []
    assert checks.check_nccl(CPU_BUILD) == []


def test_health():
    hot = make_sample(1, slowdowns=("power brake",), temperature_c=91.0)
    sleepy = make_sample(2, is_persistent=False)
    (sound,) = checks.check_health([make_sample(0), make_sample(1, is_persistent=True)])
    assert (sound.state, sound.message) == ("ok", "2 GPU(s), none is held back")
    warned, noted = checks.check_health([make_sample(0), hot, sleepy])
    assert (warned.state, warned.message) == ("warning", "GPU 1 is held back: power brake, at 91 °C")
    assert noted.state == "note"
    assert "off on GPU 2" in noted.message
    assert [f.state for f in checks.check_health([sleepy], is_linux=False)] == ["ok"]
    assert checks.check_health([]) == []


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
    findings = checks.check_iommu(types, num_devices)
    assert [finding.state for finding in findings] == ["note"] * noted


def outcome(**changed):
    """Make an outcome of three GPUs: ``outcome(_01=...)`` changes a pair."""
    pairs = {(i, j): replace(RIGHT, gigabytes_per_s=390.0 + i) for i in range(3) for j in range(3) if i != j}
    return Outcome(pairs=pairs | {(int(name[1]), int(name[2])): report for name, report in changed.items()})


def test_peers_that_are_right():
    (finding,) = checks.check_peers(outcome())
    assert (finding.state, finding.message) == ("ok", "copies of 6 of 6 pairs arrive right, at 390 to 392 GB/s")
    assert checks.check_peers(None) == []


def test_peers_that_are_not():
    wrong, hangs = PairReport(verdict="wrong", detail="bfloat16 by a kernel"), PairReport(verdict="hangs")
    findings = checks.check_peers(outcome(_01=wrong, _02=hangs, _20=hangs, _12=PairReport(verdict="untested")))
    assert [finding.state for finding in findings] == ["warning", "warning", "note", "ok"]
    assert "arrive wrong between 0>1 (bfloat16 by a kernel)" in findings[0].message
    assert "hang between 0>2, 2>0" in findings[1].message
    assert "1>2" in findings[2].message
    assert "2 of 6 pairs" in findings[3].message


def test_many_broken_pairs_are_counted():
    pairs = dict.fromkeys(outcome().pairs, PairReport(verdict="hangs"))
    (finding,) = checks.check_peers(Outcome(pairs=pairs))
    assert "0>1, 0>2, 1>0 and 3 more" in finding.message


@pytest.mark.parametrize(
    ("verdict", "state", "words"),
    [("right", "ok", "is right"), ("wrong", "warning", "is wrong (x)"), ("hangs", "warning", "hangs (x)")],
)
def test_collective(verdict, state, words):
    report = PairReport(verdict=verdict, detail="" if verdict == "right" else "x")
    finding = checks.check_peers(replace(outcome(), collective=report))[-1]
    assert (finding.check, finding.state) == ("nccl", state)
    assert finding.message.endswith(words)
