"""Choose devices by free memory and load, or give the reason for each device that doesn't fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everygpu.devices import reserve, visible
from everygpu.devices.nvml import DeviceSample
from everygpu.errors import DeviceError, OptionError
from everygpu.units import format_size, parse_size

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """How many devices, and what each must have: the arguments of ``select_devices``, or the options of commands."""

    count: int | None = None
    min_free_memory: int | str | None = None
    max_utilization: float | None = None
    name: str | None = None
    exclude: Sequence[int | str] = ()
    indices: tuple[int, ...] = ()
    """``nvidia-smi --query-gpu=index``: exactly these, in this order."""

    def __post_init__(self) -> None:
        count, most, exclude = self.count, self.max_utilization, self.exclude
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise OptionError(f"count={count!r} is no number of devices. Pass 1 or more, or leave it out for all.")
        if most is not None and not 0 <= most <= 100:
            raise OptionError(f"max_utilization={most!r} is no percentage. Pass 0 to 100: 25 for a quarter.")
        if isinstance(exclude, str) or not all(isinstance(entry, (int, str)) and entry != "" for entry in exclude):
            raise OptionError(f"exclude={exclude!r} is no list of indices and names. Pass for example [0, 'T400'].")
        parse_size(self.min_free_memory or 0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for, so that the CPU will do."""
        return self == Demand(exclude=self.exclude) and not self.exclude


def select_devices(
    count: int | None = None,
    *,
    min_free_memory: int | str | None = None,
    max_utilization: float | None = None,
    name: str | None = None,
    exclude: Sequence[int | str] = (),
) -> "list[torch.device]":
    """Choose among the visible devices, the one with the most free memory first.

    GPUs that another ``everygpu run`` has reserved are left out. This function reserves none::

        devices = everygpu.select_devices()  # or select_devices(2, min_free_memory="8GiB")
        model = everygpu.DataParallel(model, device_ids=devices)

    Args:
        count: How many to take; None for every one that fits.
        min_free_memory: Bytes, or a size such as ``"8GiB"``, that must be free on each.
        max_utilization: 0 to 100; busier devices are left out.
        name: A part of the name, such as ``"H100"``, in any case.
        exclude: Devices to leave out: indices as in nvidia-smi, parts of a name, or the beginning of a UUID.
    Returns:
        Devices for ``device_ids``. ``[cpu]`` on a machine without an accelerator, if nothing was asked for.
    Raises:
        DeviceError: too few devices fit; the message lists every device and why it was refused.
        OptionError: an argument is outside what it may be.
    Source:
        NVML's memory and utilization, as ``nvidia-smi --query-gpu=memory.free,utilization.gpu`` prints them.
    """
    demand = Demand(
        count=count, min_free_memory=min_free_memory, max_utilization=max_utilization, name=name, exclude=exclude
    )
    devices = visible.visible_devices()
    if not devices and demand.is_empty:
        import torch

        return [torch.device("cpu")]
    chosen = choose(devices, demand, refuse_held(devices, reserve.find_holders()))
    return [gpu.device for gpu in chosen if gpu.device is not None]


def choose(
    devices: Sequence[DeviceSample],
    demand: Demand,
    refused: Mapping[int, str] | None = None,
    use_cpu: str = "Leave the arguments out to use the CPU.",
) -> list[DeviceSample]:
    """Take the devices that meet a demand, the one with the most free memory first; too few are a ``DeviceError``."""
    refused = refused or {}
    reasons = [refused.get(i) or find_fault(device, demand) for i, device in enumerate(devices)]
    fitting = [device for device, reason in zip(devices, reasons) if reason is None]
    num_wanted = demand.count or len(demand.indices) or 1
    if len(fitting) < num_wanted:
        found = f"Found {len(fitting)} of {num_wanted} requested GPUs"
        if not devices:
            raise DeviceError(f"{found}. {use_cpu}".rstrip())
        advice = f"Ask for fewer or for less, or wait. {use_cpu}".rstrip()
        raise DeviceError(f"{found}. {advice}\n{format_verdicts(devices, reasons)}")
    if demand.indices:
        return sorted(fitting, key=lambda device: demand.indices.index(device.index or 0))
    return sorted(fitting, key=lambda device: -(device.free_memory_bytes or 0))[: demand.count]


def refuse_held(devices: Sequence[DeviceSample], holders: Mapping[str, reserve.Holder]) -> dict[int, str]:
    """Make reasons for ``choose`` of what other runs have reserved."""
    return {i: holders[d.uuid].reason for i, d in enumerate(devices) if d.uuid is not None and d.uuid in holders}


def find_fault(device: DeviceSample, demand: Demand) -> str | None:
    """Say the first thing a device lacks for a demand; None when it fits. What isn't known doesn't fit."""
    if device.fault is not None:
        return device.fault
    if demand.indices and device.index not in demand.indices:
        return "not asked for"
    if demand.name is not None and demand.name.lower() not in device.name.lower():
        return f"not named {demand.name!r}"
    for entry in demand.exclude:
        if _is_meant(device, entry):
            return f"excluded by {entry!r}"
    has, size = device.free_memory_bytes, demand.min_free_memory
    if size is not None and (has is None or has < parse_size(size)):
        return f"free memory {'unknown' if has is None else format_size(has)}, below {format_size(parse_size(size))}"
    busy, most = device.utilization_pct, demand.max_utilization
    if most is not None and (busy is None or busy > most):
        return f"utilization {'unknown' if busy is None else f'{busy:g}%'}, above {most:g}%"
    return None


def _is_meant(device: DeviceSample, entry: int | str) -> bool:
    if isinstance(entry, int):
        return device.index == entry
    if entry.isdecimal():  # an index, or a model such as "4090"; "3" is not meant to be the one of HBM3
        return device.index == float(entry) or entry in device.name.split()
    entry, uuid = entry.lower(), (device.uuid or "").lower()
    return entry in device.name.lower() or uuid.startswith(entry) or uuid[4:].startswith(entry)


def format_verdicts(devices: Sequence[DeviceSample], reasons: Sequence[str | None]) -> str:
    """Format a table of devices, each with the reason why it doesn't fit."""
    rows = [("device", "name", "free", "total", "busy", "verdict")]
    for device, reason in zip(devices, reasons):
        busy = "?" if device.utilization_pct is None else f"{device.utilization_pct:g}%"
        free, total = format_size(device.free_memory_bytes), format_size(device.total_memory_bytes)
        rows.append((device.label, device.name, free, total, busy, reason or "fits"))
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
    return "\n".join(f"  {line.rstrip()}" for line in lines)
