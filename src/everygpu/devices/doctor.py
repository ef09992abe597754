"""Gather the facts that ``checks`` and ``host_checks`` judge, for ``everygpu doctor``."""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from everygpu.devices import checks, host_checks, nvml, p2p
from everygpu.devices.checks import Finding, TorchBuild, Version
from everygpu.devices.peer_run import Outcome
from everygpu.torch_private.cuda import has_nccl

_NVIDIA, _DISPLAY = "0x10de", "0x03"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The finding."""

    findings: tuple[Finding, ...]
    peers: Outcome | None
    """What came of copying between GPUs, with speeds; None where there are fewer than two."""

    @property
    def is_usable(self) -> bool:
        """Whether nothing keeps the GPUs, or the CPU where there are none, from being used."""
        return all(finding.state != "error" for finding in self.findings)


def diagnose(
    environ: Mapping[str, str],
    *,
    test_peers: bool = True,
    system: Path = Path("/"),
    on_pair: Callable[[int, int], object] = lambda num_pairs, num_all: None,
) -> Diagnosis:
    """Look at everything.

    Args:
        environ: As ``os.environ``.
        test_peers: Copy between the GPUs, which takes some seconds and 256 MiB on each.
        system: Where the system's files are.
        on_pair: Called before the first pair of GPUs and after each, with the number of pairs so far and of all.
    Returns:
        The findings. The result of the copy test is kept for later runs.
    """
    driver, samples, build = nvml.sample_driver(), nvml.sample_devices() or [], describe_torch()
    outcome = _test_peers(build, on_pair) if test_peers else None
    findings = [
        checks.check_driver(driver, count_boards(system)),
        checks.check_torch(build, driver, environ),
        *checks.check_minor_version(build, driver),
        *checks.check_architectures(build),
        *checks.check_nccl(build),
        *checks.check_peers(outcome),
        *checks.check_iommu(read_iommu_types(system), build.num_devices),
        *checks.check_health(samples, is_linux=sys.platform == "linux"),
        *host_checks.check_variables(environ),
        *host_checks.check_order(samples, environ),
        *host_checks.check_shared_memory(measure_shared_memory(system)),
        *_check_limits(),
    ]
    return Diagnosis(findings=tuple(findings), peers=outcome)


def _test_peers(build: TorchBuild, on_pair: Callable[[int, int], object]) -> Outcome | None:
    if build.num_devices < 2:
        return None
    num_all = build.num_devices * (build.num_devices - 1)
    on_pair(0, num_all)
    return p2p.examine_and_keep(p2p.list_uuids(), full=True, on_pair=lambda num_pairs: on_pair(num_pairs, num_all))


def describe_torch() -> TorchBuild:
    """Ask torch what it was built for and what it sees; makes no CUDA context."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return TorchBuild(
        version=torch.__version__,
        cuda_version=_parse(torch.version.cuda),
        is_rocm=torch.version.hip is not None,
        num_devices=num_devices,
        architectures=tuple(torch.cuda.get_arch_list()) if num_devices else (),
        capabilities=tuple(torch.cuda.get_device_capability(i) for i in range(num_devices)),
        nccl_version=_nccl_version(),
    )


def _parse(version: str | None) -> Version | None:
    return None if version is None else tuple(int(part) for part in version.split(".")[:2])


def _nccl_version() -> Version | None:
    if not has_nccl():
        return None
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return tuple(part for part in version if isinstance(part, int))


def count_boards(system: Path) -> int:
    """Count NVIDIA GPUs on the PCI bus, as Linux lists them; 0 elsewhere."""
    folders = (system / "sys/bus/pci/devices").glob("*")
    return sum(_read(f / "vendor") == _NVIDIA and _read(f / "class").startswith(_DISPLAY) for f in folders)


def read_iommu_types(system: Path) -> list[str]:
    """List the types of all IOMMU groups; none where there is no IOMMU, or none to be seen."""
    return [_read(path) for path in (system / "sys/kernel/iommu_groups").glob("*/type")]


def measure_shared_memory(system: Path) -> int | None:
    """Measure /dev/shm; None where there is none."""
    folder = system / "dev/shm"
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def _check_limits() -> list[Finding]:
    if sys.platform == "win32":
        return []
    import resource

    files, locked = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    infinite = resource.RLIM_INFINITY
    return [
        *host_checks.check_open_files(None if files == infinite else files),
        *host_checks.check_locked_memory(None if locked == infinite else locked),
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
