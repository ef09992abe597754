"""The NVIDIA driver's figures for each GPU, read through NVML without making a CUDA context.

The only module that imports ``pynvml``. Where NVML is absent or broken, the log says so and the answer is None.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("everygpu")
Answer = TypeVar("Answer")

# nvml.h, nvmlClocksEventReasons. Power caps are how a busy GPU works, and idle ones slow down.
_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# nvml.h, nvmlReturn_t.
_NO_PERMISSION = 4
_LOST = (15, 16)
"""The GPU is lost, or needs a reset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """A GPU, or another accelerator that torch can use, as it was at one moment."""

    index: int | None
    """``nvidia-smi --query-gpu=index``: in PCI order; None when unknown."""
    name: str
    """``nvidia-smi --query-gpu=name``."""
    uuid: str | None
    """``nvidia-smi --query-gpu=uuid``: ``GPU-…``."""
    total_memory_bytes: int | None
    """``nvidia-smi --query-gpu=memory.total``, else what torch may use of it; None where nobody knows."""
    free_memory_bytes: int | None
    """``nvidia-smi --query-gpu=memory.free``."""
    utilization_pct: float | None = None
    """``nvidia-smi --query-gpu=utilization.gpu``: 0 to 100; None in MIG mode or when not reported."""
    processes: tuple[tuple[int, int | None], ...] = ()
    """``nvidia-smi --query-compute-apps=pid,used_memory``: pid and bytes, None bytes when not reported."""
    device: "torch.device | None" = None
    """torch's device, where torch was asked."""
    is_mig: bool = False
    """``nvidia-smi --query-gpu=mig.mode.current``: whether it is cut into instances."""
    temperature_c: float | None = None
    """``nvidia-smi --query-gpu=temperature.gpu``."""
    slowdowns: tuple[str, ...] = ()
    """``nvidia-smi --query-gpu=clocks_event_reasons.active``: of these, what holds a working GPU back."""
    instances: tuple[str, ...] = ()
    """``nvidia-smi -L``: UUIDs of its MIG instances, ``MIG-…``."""
    fault: str | None = None
    """Why it can't be used, such as a lost GPU's answer; it keeps its index, so that others keep theirs."""

    @property
    def label(self) -> str:
        """``GPU 0``, ``cuda:0 (GPU 2)`` or ``mps:0``."""
        if self.device is None:
            return f"GPU {self.index}"
        return str(self.device) if self.index is None else f"{self.device} (GPU {self.index})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSample:
    """The NVIDIA driver of this machine."""

    version: str
    """``nvidia-smi --query-gpu=driver_version``."""
    cuda_version: tuple[int, int] | None
    """``nvidia-smi``, "CUDA Version": the newest that the driver serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlFailure:
    """Why NVML doesn't answer."""

    is_absent: bool
    """Whether there is no driver at all, rather than a broken one."""
    text: str


def sample_devices(library: Any = None) -> list[DeviceSample] | None:
    """Ask NVML about every GPU of the machine that isn't others', in PCI order; None where NVML is broken."""
    samples = _query(library, lambda nvml: [_sample_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())])
    if isinstance(samples, NvmlFailure):
        # A machine without a driver is no fault.
        level = logging.DEBUG if samples.is_absent else logging.WARNING
        logger.log(level, "NVML does not answer (%s): GPUs are described by torch alone.", samples.text)
        return None
    return [sample for sample in samples if sample is not None]


def explain_lost(samples: Iterable[DeviceSample]) -> list[str]:
    """Say which GPUs don't answer, a line each."""
    return [f"{gpu.label} {gpu.fault}. `everygpu doctor` says what to do." for gpu in samples if gpu.fault is not None]


def sample_driver(library: Any = None) -> DriverSample | NvmlFailure:
    """Ask NVML for the driver's version, or say why that, or its number of GPUs, can't be asked."""

    def ask(nvml: Any) -> DriverSample:
        nvml.nvmlDeviceGetCount()
        number = _ask(nvml, "nvmlSystemGetCudaDriverVersion")
        cuda_version = None if number is None else (number // 1000, number % 1000 // 10)
        return DriverSample(version=str(_read(nvml, "nvmlSystemGetDriverVersion")), cuda_version=cuda_version)

    return _query(library, ask)


def name_processes(pids: Iterable[int], library: Any = None) -> dict[int, str]:
    """Find the programs behind processes, as ``nvidia-smi --query-compute-apps=process_name`` does for this user."""
    names = _query(library, lambda nvml: {pid: _ask(nvml, "nvmlSystemGetProcessName", pid) for pid in pids})
    return {} if isinstance(names, NvmlFailure) else {pid: str(name) for pid, name in names.items() if name}


def _query(library: Any, ask: Callable[[Any], Answer]) -> Answer | NvmlFailure:
    """Open NVML, ask, and close it; NVML counts its users, so other sessions stay open."""
    nvml = library
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError as error:
            logger.warning("NVML is not asked: %s. Install nvidia-ml-py for names and free memory of GPUs.", error)
            return NvmlFailure(is_absent=True, text="the package nvidia-ml-py is missing")
    try:
        nvml.nvmlInit()
        try:
            return ask(nvml)
        finally:
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        is_absent = error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return NvmlFailure(is_absent=is_absent, text=str(error))


def _sample_gpu(nvml: Any, index: int) -> DeviceSample | None:
    gpu = DeviceSample(index=index, name="?", uuid=None, total_memory_bytes=None, free_memory_bytes=None)
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpu = replace(gpu, uuid=_read(nvml, "nvmlDeviceGetUUID", handle))
        gpu = replace(gpu, name=_read(nvml, "nvmlDeviceGetName", handle))
        memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
        utilization = _ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
        temperature = _ask(nvml, "nvmlDeviceGetTemperature", handle, 0)  # nvml.h, NVML_TEMPERATURE_GPU
        slowed = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        processes = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or []
        is_mig = (_ask(nvml, "nvmlDeviceGetMigMode", handle) or [0])[0] != 0
        slots = range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0 if is_mig else 0)
        instances = [_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, slot) for slot in slots]
        uuids = [_ask(nvml, "nvmlDeviceGetUUID", instance) for instance in instances if instance is not None]
    except nvml.NVMLError as error:
        is_foreign = error.value == _NO_PERMISSION  # CUDA doesn't number it, either
        return None if is_foreign else replace(gpu, fault=f"doesn't answer: {error}")
    return replace(
        gpu,
        total_memory_bytes=None if memory is None else int(memory.total),
        free_memory_bytes=None if memory is None else int(memory.free),
        utilization_pct=None if utilization is None else float(utilization.gpu),
        processes=tuple((process.pid, process.usedGpuMemory) for process in processes),
        is_mig=is_mig,
        temperature_c=None if temperature is None else float(temperature),
        slowdowns=tuple(words for bit, words in _SLOWDOWNS.items() if slowed & bit),
        instances=tuple(uuid for uuid in uuids if uuid is not None),
    )


def _ask(nvml: Any, query: str, *args: Any) -> Any:
    """Answer an optional query; None where this GPU or driver has no answer. The error of a lost GPU is raised."""
    try:
        return _read(nvml, query, *args)
    except nvml.NVMLError as error:
        if error.value in _LOST:
            raise
        return None


def _read(nvml: Any, query: str, *args: Any) -> Any:
    try:
        return getattr(nvml, query)(*args)
    except UnicodeDecodeError as error:  # names of programs are bytes, and pynvml takes them for UTF-8
        return error.object.decode("utf-8", "backslashreplace")
