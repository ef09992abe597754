"""Find what keeps GPUs from working or from being fast, for ``everygpu doctor``: facts, and what they mean."""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from everygpu.devices import nvml, p2p
from everygpu.devices.nvml import DeviceSample, DriverSample, NvmlFailure
from everygpu.devices.p2p import Pair, PairReport
from everygpu.devices.visible import has_known_order
from everygpu.torch_private.core import has_nccl
from everygpu.units import format_size

State = Literal["ok", "note", "warning", "error"]
Version = tuple[int, ...]
_ENOUGH_SHARED_BYTES = 2**30
_ENOUGH_FILES = 4096
IOMMU_FIX = "On the machine itself, start Linux with iommu=pt, or turn off IOMMU and ACS in the BIOS."
# Variable, its values that matter (None for all but 0), and what they do.
_VARIABLES: tuple[tuple[str, tuple[str, ...] | None, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", None, "every launch waits for its kernel; NCCL is not used"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", None, "each tensor asks the driver for memory"),
    ("NCCL_P2P_DISABLE", ("1",), "NCCL sends through host memory"),
    ("NCCL_DEBUG", ("INFO", "TRACE"), "NCCL writes much to the log"),
    (p2p.VARIABLE, ("staged",), "copies between GPUs go through host memory"),
    (p2p.VARIABLE, ("trust",), "copies between GPUs are trusted without a test"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, and what to do about it, in a line."""

    check: str
    state: State
    """``error``: the GPUs can't be used; ``warning``: something is slow or will fail; ``note``: worth knowing."""
    message: str
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What torch was built for, and what it sees."""

    version: str
    cuda_version: Version | None
    is_rocm: bool
    num_devices: int
    nccl_version: Version | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found."""

    findings: tuple[Finding, ...]
    peers: Mapping[Pair, PairReport] | None
    """What came of copying between GPUs; None where there are fewer than two."""

    @property
    def is_usable(self) -> bool:
        """Whether nothing keeps the GPUs, or the CPU where there are none, from being used."""
        return all(finding.state != "error" for finding in self.findings)


def diagnose(environ: Mapping[str, str], *, test_peers: bool = True, system: Path = Path("/")) -> Diagnosis:
    """Look at everything. The test of copies takes some seconds, and is kept for later runs."""
    driver, samples, build = nvml.sample_driver(), nvml.sample_devices() or [], describe_torch()
    is_tested = test_peers and build.num_devices > 1 and not any(gpu.fault for gpu in samples)
    peers = p2p.examine_and_keep(p2p.list_uuids()) if is_tested else None
    findings = (
        check_driver(driver, count_boards(system)),
        *check_torch(build, driver, environ),
        *check_peers(peers),
        *check_health(samples),
        *check_environment(environ, samples),
        *check_limits(system),
    )
    return Diagnosis(findings=findings, peers=peers)


def check_driver(driver: DriverSample | NvmlFailure, num_boards: int) -> Finding:
    """Look at the driver; ``num_boards`` counts NVIDIA GPUs on the PCI bus, with or without one."""
    if isinstance(driver, DriverSample):
        serves = "" if driver.cuda_version is None else f", for CUDA up to {_dotted(driver.cuda_version)}"
        return Finding("driver", "ok", f"NVIDIA driver {driver.version}{serves}")
    if not driver.is_absent:
        fix = "Reboot, or reinstall the driver: its library and its kernel module may be of different versions."
        return Finding("driver", "error", f"the driver doesn't answer: {driver.text}", fix)
    if num_boards:
        fix = "Install the NVIDIA driver; in a container, start it with --gpus all."
        return Finding("driver", "error", f"{num_boards} NVIDIA GPU(s) without a driver: {driver.text}", fix)
    return Finding("driver", "note", f"no NVIDIA driver: {driver.text}")


def check_torch(build: TorchBuild, driver: DriverSample | NvmlFailure, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Look at whether torch was built for this driver and these GPUs, and sees them."""
    if not build.is_rocm and (fault := _find_mismatch(build, driver, environ)):
        yield fault
        return
    kind = "ROCm" if build.cuda_version is None else f"CUDA {_dotted(build.cuda_version)}"
    yield Finding("torch", "ok", f"torch {build.version} with {kind} sees {build.num_devices} GPU(s)")
    if build.num_devices > 1 and build.nccl_version is None:
        message = "torch has no NCCL: several GPUs exchange gradients by copies, which is slower"
        yield Finding("nccl", "note", message, "Use Linux, or WSL, for NCCL.")
    elif build.num_devices > 1 and build.nccl_version is not None:
        yield Finding("nccl", "ok", f"NCCL {_dotted(build.nccl_version)}")


def _find_mismatch(build: TorchBuild, driver: DriverSample | NvmlFailure, environ: Mapping[str, str]) -> Finding | None:
    text, is_there = environ.get("CUDA_VISIBLE_DEVICES"), isinstance(driver, DriverSample)
    if build.cuda_version is None:
        message = f"torch {build.version} is built without CUDA{', and there are NVIDIA GPUs' * is_there}"
        return Finding("torch", "error" if is_there else "note", message, "For NVIDIA GPUs install a CUDA build.")
    if not isinstance(driver, DriverSample):
        return None
    serves = driver.cuda_version
    if serves is not None and build.cuda_version[0] > serves[0]:
        message = f"torch is built for CUDA {_dotted(build.cuda_version)}, the driver serves {_dotted(serves)}"
        return Finding("torch", "error", message, f"Update the driver, or install a torch for CUDA {serves[0]}.")
    if build.num_devices:
        return None
    if text is not None:
        fix = "Unset CUDA_VISIBLE_DEVICES, or see `everygpu devices` for valid values."
        return Finding("torch", "warning", f"torch sees no GPU under CUDA_VISIBLE_DEVICES={text!r}", fix)
    fix = "See whether nvidia-smi works, and whether this user may open /dev/nvidia*."
    return Finding("torch", "error", "torch sees no GPU, and the driver does", fix)


def check_peers(peers: Mapping[Pair, PairReport] | None) -> Iterator[Finding]:
    """Look at what came of the test of copies; None when it was not run."""
    if peers is None:
        return
    for verdict, what in (("wrong", "arrive wrong"), ("hangs", "hang")):
        if pairs := _list_pairs(peers, verdict):
            message = f"copies {what} between {pairs}: everygpu goes through host memory"
            yield Finding("P2P", "warning", message, IOMMU_FIX)
    if pairs := _list_pairs(peers, "untested"):
        fix = "Test again when the GPUs have memory free and are not in exclusive mode."
        yield Finding("P2P", "note", f"not tested: {pairs}", fix)
    if num_right := sum(report.verdict == "right" for report in peers.values()):
        yield Finding("P2P", "ok", f"copies of {num_right} of {len(peers)} pairs arrive right")


def _list_pairs(peers: Mapping[Pair, PairReport], verdict: str) -> str:
    found = [(pair, report.detail) for pair, report in peers.items() if report.verdict == verdict]
    names = [f"{i}>{j}" + (f" ({detail})" if detail else "") for (i, j), detail in found]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_health(samples: Sequence[DeviceSample]) -> Iterator[Finding]:
    """Look at what GPUs are lost, and what slows the others down."""
    slowed = [sample for sample in samples if sample.slowdowns]
    lost = [sample for sample in samples if sample.fault is not None]
    for sample in lost:
        fix = "Reset it: nvidia-smi --gpu-reset, or restart the machine. The kernel's log (dmesg) has its Xid."
        yield Finding("health", "error", f"{sample.label} {sample.fault}", fix)
    for sample in slowed:
        heat = "" if sample.temperature_c is None else f", at {sample.temperature_c:g} °C"
        fix = "Look at its cooling and its power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER."
        yield Finding("health", "warning", f"{sample.label} is slowed: {', '.join(sample.slowdowns)}{heat}", fix)
    if len(samples) > len(lost) and not slowed:
        yield Finding("health", "ok", f"{len(samples) - len(lost)} GPU(s), none is slowed")


def check_environment(environ: Mapping[str, str], samples: Sequence[DeviceSample]) -> Iterator[Finding]:
    """Look at variables that slow training down, and at the order of unlike GPUs."""
    for name, values, what in _VARIABLES:
        if environ.get(name, "") not in ("", "0") and (values is None or environ[name] in values):
            state: State = "warning" if values is None else "note"
            yield Finding("environment", state, f"{name}={environ[name]}: {what}", "Unset it.")
    if not has_known_order(environ, samples):
        message = "unlike GPUs: torch numbers the fastest first, nvidia-smi by PCI address"
        fix = "Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or choose by UUID: `everygpu run` does."
        yield Finding("environment", "note", message, fix)


def check_limits(system: Path) -> Iterator[Finding]:
    """Look at what DataLoader workers need: /dev/shm to hand over batches, and open files."""
    if (system / "dev/shm").is_dir():
        shared = shutil.disk_usage(system / "dev/shm").free
        message, fix = f"/dev/shm has {format_size(shared)} free", None
        if shared < _ENOUGH_SHARED_BYTES:
            message += ": loader workers may die with a bus error"
            fix = "Remove what is left there. In a container: --shm-size=8g. Else: mount -o remount,size=8G /dev/shm."
        yield Finding("shared memory", "warning" if fix else "ok", message, fix)
    if sys.platform != "win32":
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY or limit >= _ENOUGH_FILES:
            yield Finding("open files", "ok", "no limit" if limit == resource.RLIM_INFINITY else str(limit))
        else:
            message = f"{limit} at most: many loader workers may fail with 'Too many open files'"
            yield Finding("open files", "warning", message, "ulimit -n 65536")


def describe_torch() -> TorchBuild:
    """Ask torch what it was built for and what it sees; makes no CUDA context."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cuda = torch.version.cuda
    nccl = torch.cuda.nccl.version() if has_nccl() else None  # type: ignore[no-untyped-call]
    return TorchBuild(
        version=torch.__version__,
        cuda_version=None if cuda is None else tuple(int(part) for part in cuda.split(".")[:2]),
        is_rocm=torch.version.hip is not None,
        num_devices=num_devices,
        nccl_version=None if nccl is None else tuple(part for part in nccl if isinstance(part, int)),
    )


def count_boards(system: Path) -> int:
    """Count NVIDIA GPUs on the PCI bus, as Linux lists them; 0 elsewhere."""
    folders = (system / "sys/bus/pci/devices").glob("*")
    return sum(_read(f / "vendor") == "0x10de" and _read(f / "class").startswith("0x03") for f in folders)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
