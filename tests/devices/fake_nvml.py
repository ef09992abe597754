"""A stand-in for the ``pynvml`` module, with answers as real drivers gave them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from everygpu.devices.nvml import DeviceSample

GIB = 2**30
H200_UUIDS = ("GPU-a5013c05-0df6-c9f7-a45c-22c4343803ae", "GPU-6ef3c567-5f00-9821-2e52-23911c894a4c")


@dataclass(kw_only=True)
class Gpu:
    """One GPU: what its queries answer; None is NVML_ERROR_NOT_SUPPORTED."""

    name: str = "NVIDIA H200"
    uuid: str = H200_UUIDS[0]
    total: int | None = 140 * GIB
    used: int = 0
    reserved: int = GIB
    utilization: int | None = 0
    processes: Sequence[tuple[int, int | None]] = ()
    mig: bool = False
    instances: Sequence[str] = ()
    lost: bool = False
    temperature: int | None = 31
    slowdowns: int | None = 1


class FakeNvml:
    """Answers like ``pynvml``; counts init and shutdown."""

    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"NVML error {value}")
            self.value = value

    def __init__(
        self,
        *gpus: Gpu,
        fail_init: int | None = None,
        cuda_version: int | None = 13_000,
        faults: Mapping[tuple[str, int | None], int] | None = None,
        process_names: Mapping[int, bytes] | None = None,
    ) -> None:
        """``faults`` has an error for a query of the GPU at a position, or of None for the driver's own."""
        self.faults = faults or {}
        self.process_names = process_names or {7: b"/usr/bin/python3", 4711: b"python"}
        self.cuda_version = cuda_version
        self.gpus = gpus
        self.fail_init = fail_init
        self.num_open = 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._faulty(name, found) if name.startswith("nvml") else found

    def _faulty(self, name: str, query: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            position = next((i for i, gpu in enumerate(self.gpus) if args and args[0] is gpu), None)
            position = args[0] if name == "nvmlDeviceGetHandleByIndex" else position
            if (code := self.faults.get((name, position))) is not None:
                if name == "nvmlShutdown":
                    query(*args)
                self._fail(code)
            return query(*args)

        return ask

    def _fail(self, code: int) -> None:
        raise self.NVMLError(code)

    def _known(self, answer: object) -> object:
        assert self.num_open > 0, "NVML was asked while it was not open"
        if answer is None:
            self._fail(self.NVML_ERROR_NOT_SUPPORTED)
        return answer

    def nvmlInit(self) -> None:
        if self.fail_init is not None:
            self._fail(self.fail_init)
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.num_open > 0
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if self.gpus[index].lost:
            self._fail(self.NVML_ERROR_GPU_IS_LOST)
        return self.gpus[index]

    def nvmlDeviceGetName(self, gpu: Gpu) -> object:
        return self._known(gpu.name)

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> object:
        return self._known(gpu.uuid)

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> SimpleNamespace:
        self._known(gpu.total)
        assert gpu.total is not None
        used = gpu.used + gpu.reserved
        return SimpleNamespace(total=gpu.total, used=used, free=gpu.total - used)

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._known(gpu.utilization))

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes]

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> object:
        assert sensor == 0
        return self._known(gpu.temperature)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: Gpu) -> object:
        return self._known(gpu.slowdowns)

    def nvmlSystemGetDriverVersion(self) -> object:
        return self._known("580.159.03")

    def nvmlSystemGetCudaDriverVersion(self) -> object:
        return self._known(self.cuda_version)

    def nvmlSystemGetProcessName(self, pid: int) -> object:
        name = self.process_names.get(pid)
        return self._known(None if name is None else name.decode())  # as pynvml does

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        return [int(gpu.mig)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, slot: int) -> SimpleNamespace:
        if slot >= len(gpu.instances):
            self._fail(self.NVML_ERROR_NOT_FOUND)
        return SimpleNamespace(uuid=gpu.instances[slot])


def two_h200s(**changes: object) -> tuple[Gpu, Gpu]:
    """The GPUs of the machine whose answers are recorded here, idle; ``changes`` go to the second."""
    second = Gpu(uuid=H200_UUIDS[1])
    return Gpu(), replace(second, **changes)  # type: ignore[arg-type]


def make_sample(index: int, *, free: int | None = 100 * GIB, **changes: object) -> DeviceSample:
    """Make an idle GPU's sample: ``make_sample(1, free=3 * GIB, utilization_pct=50.0)``."""
    fields: dict[str, object] = {
        "index": index,
        "name": "NVIDIA H200",
        "uuid": f"GPU-{index:08x}-0df6-c9f7-a45c-22c4343803ae",
        "total_memory_bytes": None if free is None else 140 * GIB,
        "free_memory_bytes": free,
        "utilization_pct": 0.0,
    }
    return DeviceSample(**(fields | changes))  # type: ignore[arg-type]
