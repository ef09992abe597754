"""The checks of ``everygpu doctor`` on GPUs and their software: pure functions of gathered facts."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from everygpu.devices.nvml import DeviceSample, DriverSample, NvmlFailure
from everygpu.devices.peer_run import Outcome, PairReport

State = Literal["ok", "note", "warning", "error"]
Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    check: str
    state: State
    """``error``: the GPUs can't be used; ``warning``: something is slow or will fail; ``note``: worth knowing."""
    message: str
    fix: str | None = None
    """What to do, in a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What torch was built for, and what it sees."""

    version: str
    cuda_version: Version | None
    """``torch.version.cuda``; None for a build without it."""
    is_rocm: bool
    num_devices: int
    """``torch.cuda.device_count()``."""
    architectures: tuple[str, ...]
    """``torch.cuda.get_arch_list()``, such as ``sm_90`` and ``compute_90``."""
    capabilities: tuple[Version, ...]
    """``torch.cuda.get_device_capability`` of each device."""
    nccl_version: Version | None
    """``torch.cuda.nccl.version()``; None where torch has none."""


def check_driver(driver: DriverSample | NvmlFailure, num_boards: int) -> Finding:
    """Look at the driver itself.

    Args:
        driver: What NVML says.
        num_boards: NVIDIA GPUs on the PCI bus, with or without a driver.
    """
    if isinstance(driver, DriverSample):
        serves = "" if driver.cuda_version is None else f", for CUDA up to {_dotted(driver.cuda_version)}"
        return Finding(check="driver", state="ok", message=f"NVIDIA driver {driver.version}{serves}")
    if not driver.is_absent:
        fix = "Reboot, or reinstall the driver: its library and its kernel module may be of different versions."
        return Finding(check="driver", state="error", message=f"the driver doesn't answer: {driver.text}", fix=fix)
    if num_boards:
        message = f"{num_boards} NVIDIA GPU(s) on the PCI bus, but no driver: {driver.text}"
        fix = "Install the NVIDIA driver; in a container, start it with --gpus all."
        return Finding(check="driver", state="error", message=message, fix=fix)
    return Finding(check="driver", state="note", message=f"no NVIDIA driver: {driver.text}")


def check_torch(build: TorchBuild, driver: DriverSample | NvmlFailure, environ: Mapping[str, str]) -> Finding:
    """Look at whether torch was built for this driver, and sees its GPUs."""
    if build.is_rocm or not isinstance(driver, DriverSample):
        return _see(build)
    if build.cuda_version is None:
        message = f"torch {build.version} is built without CUDA, and there are NVIDIA GPUs"
        return Finding(check="torch", state="error", message=message, fix="Install a CUDA build of torch.")
    serves = driver.cuda_version
    if serves is not None and build.cuda_version[0] > serves[0]:
        message = f"torch is built for CUDA {_dotted(build.cuda_version)}, the driver serves {_dotted(serves)} at most"
        fix = f"Update the driver, or install a torch for CUDA {serves[0]}."
        return Finding(check="torch", state="error", message=message, fix=fix)
    if build.num_devices == 0:
        return _see_none(environ)
    return _see(build)


def _see(build: TorchBuild) -> Finding:
    cuda = "no CUDA" if build.cuda_version is None else f"CUDA {_dotted(build.cuda_version)}"
    kind = "ROCm" if build.is_rocm else cuda
    message = f"torch {build.version} with {kind} sees {build.num_devices} GPU(s)"
    return Finding(check="torch", state="ok", message=message)


def _see_none(environ: Mapping[str, str]) -> Finding:
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is not None:
        message = f"torch sees no GPU under CUDA_VISIBLE_DEVICES={text!r}"
        fix = "Unset CUDA_VISIBLE_DEVICES, or see `everygpu devices` for valid values."
        return Finding(check="torch", state="warning", message=message, fix=fix)
    fix = "See whether nvidia-smi works, and whether this user may open /dev/nvidia*."
    return Finding(check="torch", state="error", message="torch sees no GPU, and the driver does", fix=fix)


def check_minor_version(build: TorchBuild, driver: DriverSample | NvmlFailure) -> list[Finding]:
    """Look at a torch that is newer than the driver within one major version: it runs, with limits."""
    if build.cuda_version is None or not isinstance(driver, DriverSample) or driver.cuda_version is None:
        return []
    if build.cuda_version[0] != driver.cuda_version[0] or build.cuda_version[:2] <= driver.cuda_version:
        return []
    message = f"torch's CUDA {_dotted(build.cuda_version)} is newer than the driver's {_dotted(driver.cuda_version)}"
    fix = "Update the driver if kernels that are compiled on the spot fail to load."
    return [Finding(check="torch", state="note", message=message, fix=fix)]


def check_architectures(build: TorchBuild) -> list[Finding]:
    """Look at whether torch has kernels for every GPU: of its own major version, or to be compiled for it."""
    if build.is_rocm or not build.architectures:
        return []
    lacking = sorted({c for c in build.capabilities if not any(_runs_on(a, c) for a in build.architectures)})
    return [
        Finding(
            check="torch",
            state="error",
            message=f"torch has no kernels for GPUs of compute capability {_dotted(capability)}",
            fix="Install a build of torch that has them: newer for new GPUs, older for old ones.",
        )
        for capability in lacking
    ]


def _runs_on(architecture: str, capability: Version) -> bool:
    kind, _, number = architecture.partition("_")
    digits = "".join(itertools.takewhile(str.isdecimal, number))
    if len(digits) < 2:
        return True
    built_for = (int(digits[:-1]), int(digits[-1]))
    if kind == "compute":
        return built_for <= capability
    return built_for[0] == capability[0] and built_for[1] <= capability[1]


def check_nccl(build: TorchBuild) -> list[Finding]:
    """Look at NCCL, where several GPUs have a use for it."""
    if build.num_devices < 2:
        return []
    if build.nccl_version is None:
        message = "torch has no NCCL: several GPUs exchange gradients by copies, which is slower"
        return [Finding(check="nccl", state="note", message=message, fix="Use Linux, or WSL, for NCCL.")]
    return [Finding(check="nccl", state="ok", message=f"NCCL {_dotted(build.nccl_version)}")]


def check_health(samples: Iterable[DeviceSample], *, is_linux: bool = True) -> list[Finding]:
    """Look at what holds GPUs back, and at persistence mode."""
    samples = list(samples)
    findings = [
        Finding(
            check="health",
            state="warning",
            message=f"{sample.label} is held back: {', '.join(sample.slowdowns)}{_at(sample)}",
            fix="Look at its cooling and its power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER.",
        )
        for sample in samples
        if sample.slowdowns
    ]
    sleepy = [sample.label for sample in samples if sample.is_persistent is False]
    if sleepy and is_linux:
        message = f"persistence mode is off on {', '.join(sleepy)}: the first use after a pause takes longer"
        findings.append(Finding(check="health", state="note", message=message, fix="sudo nvidia-smi -pm 1"))
    if samples and not findings:
        findings.append(Finding(check="health", state="ok", message=f"{len(samples)} GPU(s), none is held back"))
    return findings


def _at(sample: DeviceSample) -> str:
    return "" if sample.temperature_c is None else f", at {sample.temperature_c:g} °C"


def check_iommu(types: Iterable[str], num_devices: int) -> list[Finding]:
    """Look at whether the IOMMU translates what GPUs send each other.

    Args:
        types: Of all IOMMU groups: ``identity`` where nothing is translated, else ``DMA`` or ``DMA-FQ``.
        num_devices: How many GPUs torch sees.
    Source:
        Linux, /sys/kernel/iommu_groups/<group>/type; NCCL's documentation, "PCI Access Control Services".
    """
    if num_devices < 2 or not any(kind.startswith("DMA") for kind in types):
        return []
    message = "the IOMMU translates: where GPUs exchange over PCIe, that is slow, and on some boards wrong"
    return [Finding(check="iommu", state="note", message=message, fix=IOMMU_FIX)]


IOMMU_FIX = "On the machine itself, start Linux with iommu=pt, or turn off IOMMU and ACS in the BIOS."


def check_peers(outcome: Outcome | None) -> list[Finding]:
    """Look at what came of the test of copies; None when it was not run."""
    if outcome is None:
        return []
    by_verdict: dict[str, list[str]] = {}
    for (source, target), report in outcome.pairs.items():
        by_verdict.setdefault(report.verdict, []).append(f"{source}>{target}{_detail(report)}")
    findings = [
        Finding(
            check="P2P",
            state="warning",
            message=f"copies {what} between {_shorten(by_verdict[verdict])}: everygpu goes through host memory",
            fix=IOMMU_FIX,
        )
        for verdict, what in (("wrong", "arrive wrong"), ("hangs", "hang"))
        if verdict in by_verdict
    ]
    if "untested" in by_verdict:
        message = f"not tested: {_shorten(by_verdict['untested'])}"
        fix = "Test again when the GPUs have memory free and are not in exclusive mode."
        findings.append(Finding(check="P2P", state="note", message=message, fix=fix))
    if "right" in by_verdict:
        message = f"copies of {len(by_verdict['right'])} of {len(outcome.pairs)} pairs arrive right{_speeds(outcome)}"
        findings.append(Finding(check="P2P", state="ok", message=message))
    return [*findings, *_check_collective(outcome.collective)]


def _check_collective(report: PairReport) -> list[Finding]:
    if report.verdict == "untested":
        return []
    if report.verdict == "right":
        return [Finding(check="nccl", state="ok", message="a sum over all GPUs is right")]
    message = f"a sum over all GPUs {'hangs' if report.verdict == 'hangs' else 'is wrong'}{_detail(report)}"
    fix = "Run with NCCL_DEBUG=INFO to see why; EVERYGPU_P2P=staged does without NCCL."
    return [Finding(check="nccl", state="warning", message=message, fix=fix)]


def _detail(report: PairReport) -> str:
    return f" ({report.detail})" if report.detail else ""


def _speeds(outcome: Outcome) -> str:
    speeds = [report.gigabytes_per_s for report in outcome.pairs.values() if report.gigabytes_per_s is not None]
    return f", at {min(speeds):g} to {max(speeds):g} GB/s" if speeds else ""


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
