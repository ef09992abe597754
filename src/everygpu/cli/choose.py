"""Choose the GPUs that ``everygpu run`` gives to a script, before torch is loaded."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from filelock import BaseFileLock

from everygpu.devices import nvml
from everygpu.devices.nvml import DeviceSample
from everygpu.devices.reserve import OWN, Holder, Reservation, reserve
from everygpu.devices.select import Demand, choose, refuse_held
from everygpu.devices.visible import pick_visible, resolve_environ
from everygpu.errors import DeviceError

NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
_POLL_S = 2.0
_USE_CPU = "Omit --gpus and the filters, or pass --cpu, to use the CPU."
_IN_MIG = "in MIG mode: set CUDA_VISIBLE_DEVICES to an instance, see nvidia-smi -L"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to change before the script runs."""

    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables to set."""
    note: str | None = None
    """A line for the user."""
    num_gpus: int = 0
    """How many GPUs the script is given for certain."""
    locks: tuple[BaseFileLock, ...] = field(default=(), compare=False)
    """What keeps other runs off them."""


def plan_run(
    demand: Demand,
    environ: Mapping[str, str],
    *,
    share: bool = False,
    wait_s: float = 0.0,
    report: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Choose the GPUs for a script, and reserve them; where nothing is asked for and there is none, the CPU will do."""
    samples = nvml.sample_devices() or []
    text = environ.get("CUDA_VISIBLE_DEVICES")
    resolve_environ(environ, samples)  # which warns, once
    sound = [gpu for gpu in samples if gpu.fault is None]
    lost = " ".join(nvml.explain_lost(samples))
    if demand.is_empty and ((sound and all(gpu.is_mig for gpu in sound)) or (text or "").startswith("MIG-")):
        return Plan(note=lost or None)  # CUDA uses one instance, the first unless the variable names another
    if demand.is_empty and not _fits(samples, demand, environ):
        if not samples:
            return Plan(note="No NVIDIA GPU found: the script runs on the CPU, or on what torch finds.")
        among = "" if text is None else f" in CUDA_VISIBLE_DEVICES={text!r}"
        return Plan(environ=NO_GPU, note=f"No usable GPU{among}: the script runs on the CPU. {lost}".rstrip())

    def select(holders: Mapping[str, Holder]) -> list[DeviceSample]:
        return choose_gpus(nvml.sample_devices() or [], demand, environ, holders, _USE_CPU)

    idle = [replace(gpu, free_memory_bytes=gpu.total_memory_bytes, utilization_pct=0.0) for gpu in samples]
    is_hopeful = _fits(idle, demand, environ)
    deadline = time.monotonic() + (wait_s if is_hopeful else 0.0)
    has_reported = False
    while True:
        try:
            taken = Reservation(select({}), ()) if share else reserve(select)
            break
        except DeviceError as error:
            if time.monotonic() >= deadline:
                hint = "\n--wait starts the script as soon as they are free; --share ignores reservations."
                raise DeviceError(f"{error}{hint if is_hopeful else ''}") from None
            if not has_reported:
                report(f"waiting for GPUs. {error}")
                has_reported = True
        time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))
    visible = ",".join(gpu.uuid or "" for gpu in taken.devices)
    settings = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if taken.locks:
        settings[OWN] = visible
    return Plan(environ=settings, num_gpus=len(taken.devices), locks=taken.locks, note=lost or None)


def _fits(samples: Sequence[DeviceSample], demand: Demand, environ: Mapping[str, str]) -> bool:
    """Whether a demand could be met if no other run had reserved anything."""
    try:
        choose_gpus(samples, demand, environ)
    except DeviceError:
        return False
    return True


def choose_gpus(
    samples: Sequence[DeviceSample],
    demand: Demand,
    environ: Mapping[str, str],
    holders: Mapping[str, Holder] | None = None,
    use_cpu: str = "",
) -> list[DeviceSample]:
    """Take the GPUs that are visible, asked for, and free enough."""
    places = pick_visible(environ.get("CUDA_VISIBLE_DEVICES"), [gpu.uuid or "" for gpu in samples])
    visible = [samples[place] for place in places]
    everything = [*visible, *(gpu for gpu in samples if gpu not in visible)]
    refused = refuse_held(everything, holders or {})
    for i, gpu in enumerate(everything):
        if gpu.fault is not None:
            refused[i] = gpu.fault
        elif gpu.is_mig:
            refused[i] = _IN_MIG
        elif i >= len(visible):
            refused[i] = f"hidden by CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')!r}"
    return choose(everything, demand, refused, use_cpu)
