"""The NVIDIA driver's figures for each GPU, read through NVML without making a CUDA context.

The only module that imports ``pynvml``. Where NVML is absent or broken, the log says so and the answer is None.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("everygpu")

# nvml.h, nvmlClocksEventReasons. Power caps are how a busy GPU works, and idle ones slow down.
_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One GPU, or one MIG instance of a GPU, as the driver reported it at one moment."""

    index: int
    """``nvidia-smi --query-gpu=index``: in PCI order; a MIG instance has its GPU's."""
    name: str
    """``nvidia-smi --query-gpu=name``."""
    uuid: str
    """``nvidia-smi --query-gpu=uuid``: ``GPU-…``; ``MIG-…`` for an instance, as in ``nvidia-smi -L``."""
    total_memory_bytes: int | None
    """``nvidia-smi --query-gpu=memory.total``; None where the GPU shares the host's memory."""
    used_memory_bytes: int | None
    """``nvidia-smi --query-gpu=memory.used``: without what the driver reserves for itself."""
    free_memory_bytes: int | None
    """``nvidia-smi --query-gpu=memory.free``."""
    utilization_pct: float | None
    """``nvidia-smi --query-gpu=utilization.gpu``: 0 to 100; None in MIG mode or when not reported."""
    processes: tuple[tuple[int, int | None], ...] = ()
    """``nvidia-smi --query-compute-apps=pid,used_memory``: pid and bytes, None bytes when not reported."""
    mig_instances: "tuple[DeviceSample, ...] | None" = None
    """``nvidia-smi --query-gpu=mig.mode.current`` and ``nvidia-smi -L``; None when MIG mode is off."""
    instance: int | None = None
    """``nvidia-smi -L``: number of a MIG instance on its GPU; None for a GPU."""
    temperature_c: float | None = None
    """``nvidia-smi --query-gpu=temperature.gpu``."""
    slowdowns: tuple[str, ...] = ()
    """``nvidia-smi --query-gpu=clocks_event_reasons.active``: of these, what holds a working GPU back."""

    @property
    def label(self) -> str:
        """``GPU 0``; ``GPU 0:1`` for a MIG instance."""
        return f"GPU {self.index}" if self.instance is None else f"GPU {self.index}:{self.instance}"


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
    """Ask NVML about every GPU of the machine, visible to CUDA or not.

    Args:
        library: What to call in place of the ``pynvml`` module.
    Returns:
        One sample per GPU, in PCI order; a GPU that doesn't answer is left out, with a log line. None
        when NVML itself is absent or broken.
    Source:
        ``nvmlDeviceGetHandleByIndex`` and the queries of ``nvidia-smi --query-gpu``. NVML ignores
        ``CUDA_VISIBLE_DEVICES``.
    """
    nvml = library or _import_pynvml()
    if nvml is None:
        return None
    try:
        with _opened(nvml):
            samples = [_sample_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        # A machine without a driver is no fault.
        level = logging.INFO if _is_absent(nvml, error) else logging.WARNING
        logger.log(level, "NVML does not answer (%s): GPUs are described by torch alone.", error)
        return None
    return [sample for sample in samples if sample is not None]


def find_lost(library: Any = None) -> list[str]:
    """Name the GPUs that no longer answer, with NVML's reason, as "GPU 1: GPU is lost"."""
    nvml = library or _import_pynvml()
    if nvml is None:
        return []
    found = []
    try:
        with _opened(nvml):
            for index in range(nvml.nvmlDeviceGetCount()):
                try:
                    nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index))
                except nvml.NVMLError as error:
                    if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                        found.append(f"GPU {index}: {error}")
    except nvml.NVMLError:  # no driver, or none of its library's version
        return []
    return found


def sample_driver(library: Any = None) -> DriverSample | NvmlFailure:
    """Ask NVML for the driver's version, or say why that can't be asked."""
    nvml = library or _import_pynvml()
    if nvml is None:
        return NvmlFailure(is_absent=True, text="the package nvidia-ml-py is missing")
    try:
        with _opened(nvml):
            number = _ask(nvml, "nvmlSystemGetCudaDriverVersion")
            cuda_version = None if number is None else (number // 1000, number % 1000 // 10)
            return DriverSample(version=str(nvml.nvmlSystemGetDriverVersion()), cuda_version=cuda_version)
    except nvml.NVMLError as error:
        return NvmlFailure(is_absent=_is_absent(nvml, error), text=str(error))


def name_processes(pids: Iterable[int], library: Any = None) -> dict[int, str]:
    """Find the programs behind processes on the GPUs, as paths or names, of those that this user may know.

    Source:
        ``nvidia-smi --query-compute-apps=pid,process_name``.
    """
    nvml = library or _import_pynvml()
    if nvml is None:
        return {}
    try:
        with _opened(nvml):
            asked = {pid: _ask(nvml, "nvmlSystemGetProcessName", pid) for pid in pids}
    except nvml.NVMLError:
        return {}
    return {pid: str(name) for pid, name in asked.items() if name}


def _import_pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        logger.warning("NVML is not asked: %s. Install nvidia-ml-py for names and free memory of GPUs.", error)
        return None
    return pynvml


@contextmanager
def _opened(nvml: Any) -> Iterator[None]:
    """Hold NVML open; init and shutdown are counted by NVML, so others' sessions stay open."""
    nvml.nvmlInit()
    try:
        yield
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _is_absent(nvml: Any, error: Any) -> bool:
    return error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)


def _sample_gpu(nvml: Any, index: int) -> DeviceSample | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        return _sample_handle(nvml, handle, index, mig_instances=_sample_instances(nvml, handle, index))
    except nvml.NVMLError as error:
        logger.warning("GPU %d is left out: NVML answers %s.", index, error)
        return None


def _sample_handle(nvml: Any, handle: Any, index: int, **more: Any) -> DeviceSample:
    # The first version of the query counts what the driver reserves (615 MiB on an H200) as used;
    # nvidia-smi shows the second. Free memory is the same in both.
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle, nvml.nvmlMemory_v2)
    memory = memory or _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    utilization = _ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
    temperature = _ask(nvml, "nvmlDeviceGetTemperature", handle, 0)  # nvml.h, NVML_TEMPERATURE_GPU
    slowed = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    processes = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or []
    return DeviceSample(
        index=index,
        name=str(nvml.nvmlDeviceGetName(handle)),
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        total_memory_bytes=None if memory is None else int(memory.total),
        used_memory_bytes=None if memory is None else int(memory.used),
        free_memory_bytes=None if memory is None else int(memory.free),
        utilization_pct=None if utilization is None else float(utilization.gpu),
        processes=tuple((process.pid, process.usedGpuMemory) for process in processes),
        temperature_c=None if temperature is None else float(temperature),
        slowdowns=tuple(words for bit, words in _SLOWDOWNS.items() if slowed & bit),
        **more,
    )


def _sample_instances(nvml: Any, parent: Any, index: int) -> tuple[DeviceSample, ...] | None:
    """List a GPU's MIG instances: none created is an empty tuple, MIG mode off is None."""
    mode = _ask(nvml, "nvmlDeviceGetMigMode", parent)
    if mode is None or mode[0] == 0:
        return None
    slots = range(nvml.nvmlDeviceGetMaxMigDeviceCount(parent))
    handles = [_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", parent, slot) for slot in slots]
    return tuple(
        _sample_handle(nvml, handle, index, instance=slot) for slot, handle in enumerate(handles) if handle is not None
    )


def _ask(nvml: Any, query: str, *args: Any) -> Any:
    """Answer an optional query; None where this GPU or driver has no answer."""
    try:
        return getattr(nvml, query)(*args)
    except nvml.NVMLError:
        return None
