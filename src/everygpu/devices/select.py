"""Choose devices by free memory and load, or give the reason for each device that doesn't fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from everygpu.devices import reserve, visible
from everygpu.errors import DeviceError, OptionError
from everygpu.units import format_size, parse_size

if TYPE_CHECKING:
    import torch

SortKey = Literal["free", "total", "index", "utilization"]


class Candidate(Protocol):
    """The properties a choice is made by; ``DeviceSample`` and ``VisibleDevice`` both have them."""

    @property
    def label(self) -> str: ...
    @property
    def index(self) -> int | None: ...
    @property
    def name(self) -> str: ...
    @property
    def uuid(self) -> str | None: ...
    @property
    def total_memory_bytes(self) -> int | None: ...
    @property
    def free_memory_bytes(self) -> int | None: ...
    @property
    def utilization_pct(self) -> float | None: ...


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """How many devices are asked for, and what each must have."""

    count: int | None = None
    """The most devices to take; None for every one that fits."""
    min_count: int | None = None
    """The fewest that will do; None for ``count``, or one without it."""
    min_free_bytes: int | None = None
    """Each device must have this much memory free."""
    min_total_bytes: int | None = None
    """Each device must have this much memory altogether."""
    max_utilization_pct: float | None = None
    """0 to 100: no device may be busier."""
    name: str | None = None
    """A part that each device's name must have, in any case."""
    exclude: tuple[int | str, ...] = ()
    """Devices to leave out: physical indices, or parts of a name or UUID."""
    sort: SortKey = "free"
    """Which come first: the most free memory, the most memory, the lowest index, or the least busy."""

    @property
    def num_required(self) -> int:
        """The fewest devices that will do."""
        return (self.count or 1) if self.min_count is None else self.min_count

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for, so that the CPU will do."""
        return self == Demand(sort=self.sort)

    @property
    def lasting(self) -> "Demand":
        """The part of it that a device doesn't come to meet by waiting."""
        needed = [size for size in (self.min_total_bytes, self.min_free_bytes) if size is not None]
        return replace(self, min_free_bytes=None, max_utilization_pct=None, min_total_bytes=max(needed, default=None))


_KEYS: Mapping[str, Callable[[Candidate], float]] = {
    "free": lambda device: -1.0 if device.free_memory_bytes is None else -float(device.free_memory_bytes),
    "total": lambda device: -1.0 if device.total_memory_bytes is None else -float(device.total_memory_bytes),
    "index": lambda device: 0.0,  # a stable sort keeps the order given
    "utilization": lambda device: 101.0 if device.utilization_pct is None else device.utilization_pct,
}


def select_devices(
    count: int | None = None,
    *,
    min_count: int | None = None,
    min_free_memory: int | str | None = None,
    min_total_memory: int | str | None = None,
    max_utilization: float | None = None,
    name: str | None = None,
    exclude: Sequence[int | str] = (),
    sort: SortKey = "free",
) -> "list[torch.device]":
    """Choose among the visible devices, the one with the most free memory first.

    GPUs that another ``everygpu run`` has reserved are left out. This function reserves none::

        devices = everygpu.select_devices()  # or select_devices(2, min_free_memory="8GiB")
        model = everygpu.DataParallel(model, device_ids=devices)

    Args:
        count: How many to take; None for every one that fits.
        min_count: The fewest that will do, if fewer than ``count``.
        min_free_memory: Bytes, or a size such as ``"8GiB"``, that must be free on each.
        min_total_memory: Bytes, or a size, that each must have altogether.
        max_utilization: 0 to 100; busier devices are left out.
        name: A part of the name, such as ``"H100"``, in any case.
        exclude: Devices to leave out: indices as in nvidia-smi, or parts of a name or UUID.
        sort: ``"free"``, ``"total"``, ``"index"`` or ``"utilization"``: which come first.
    Returns:
        Devices for ``device_ids``. ``[cpu]`` on a machine without an accelerator, if nothing was asked for.
    Raises:
        DeviceError: too few devices fit; the message lists every device and why it was refused.
        OptionError: an argument is outside what it may be.
    Source:
        NVML's memory and utilization, as ``nvidia-smi --query-gpu=memory.free,utilization.gpu`` prints them.
    """
    import torch

    demand = check_demand(
        count=count,
        min_count=min_count,
        min_free_memory=min_free_memory,
        min_total_memory=min_total_memory,
        max_utilization=max_utilization,
        name=name,
        exclude=exclude,
        sort=sort,
    )
    devices = visible.visible_devices()
    if not devices and demand.is_empty:
        return [torch.device("cpu")]
    return [chosen.device for chosen in choose(devices, demand, refuse_held(devices, reserve.find_holders()))]


def check_demand(
    *,
    count: int | None = None,
    min_count: int | None = None,
    min_free_memory: int | str | None = None,
    min_total_memory: int | str | None = None,
    max_utilization: float | None = None,
    name: str | None = None,
    exclude: Sequence[int | str] = (),
    sort: SortKey = "free",
) -> Demand:
    """Make a demand of the arguments of ``select_devices``.

    Raises:
        OptionError: an argument is outside what it may be.
    """
    _check_count("count", count)
    _check_count("min_count", min_count)
    if count is not None and min_count is not None and min_count > count:
        raise OptionError(
            f"select_devices: min_count must not be above count, got {min_count} and {count}. Lower min_count."
        )
    if max_utilization is not None and not 0 <= max_utilization <= 100:
        raise OptionError(
            f"select_devices: max_utilization must be from 0 to 100 percent, got {max_utilization!r}. "
            "Write 25 for a quarter."
        )
    if isinstance(exclude, str) or not all(isinstance(entry, (int, str)) and entry != "" for entry in exclude):
        raise OptionError(
            f"select_devices: exclude must be a list of indices and of parts of names, got {exclude!r}. "
            "Write for example [0, 'T400']."
        )
    if sort not in _KEYS:
        raise OptionError(f"select_devices: sort must be one of {', '.join(_KEYS)}, got {sort!r}.")
    return Demand(
        count=count,
        min_count=min_count,
        min_free_bytes=None if min_free_memory is None else parse_size(min_free_memory),
        min_total_bytes=None if min_total_memory is None else parse_size(min_total_memory),
        max_utilization_pct=max_utilization,
        name=name,
        exclude=tuple(exclude),
        sort=sort,
    )


def _check_count(option: str, number: int | None) -> None:
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise OptionError(
            f"select_devices: {option} must be a whole number of at least 1, got {number!r}. "
            "Leave it out for every device that fits."
        )


def choose(
    devices: Sequence[AnyCandidate], demand: Demand, refused: Mapping[int, str] | None = None
) -> list[AnyCandidate]:
    """Take the devices that meet a demand; asks neither torch nor the driver.

    Args:
        devices: All that exist, whether or not they can be used.
        demand: Count, limits and names to satisfy.
        refused: Reasons against some devices from elsewhere, by position in ``devices``.
    Returns:
        At most ``demand.count`` devices, sorted as it says; equals keep their order.
    Raises:
        DeviceError: fewer than ``demand.num_required`` devices fit.
    """
    refused = refused or {}
    reasons = [refused.get(i) or find_fault(device, demand) for i, device in enumerate(devices)]
    fitting = [device for device, reason in zip(devices, reasons) if reason is None]
    if len(fitting) < demand.num_required:
        raise DeviceError(_explain(devices, reasons, demand))
    return sorted(fitting, key=_KEYS[demand.sort])[: demand.count]


def refuse_held(devices: Sequence[Candidate], holders: Mapping[str, reserve.Holder]) -> dict[int, str]:
    """Make reasons for ``choose`` of what other runs have reserved."""
    return {i: holders[d.uuid].reason for i, d in enumerate(devices) if d.uuid is not None and d.uuid in holders}


def find_fault(device: Candidate, demand: Demand) -> str | None:
    """Say the first thing a device lacks for a demand; None when it fits. What isn't known doesn't fit."""
    faults = (
        _fault_of_name(device, demand),
        _fault_of_size("total", device.total_memory_bytes, demand.min_total_bytes),
        _fault_of_size("free", device.free_memory_bytes, demand.min_free_bytes),
        _fault_of_load(device.utilization_pct, demand.max_utilization_pct),
    )
    return next((fault for fault in faults if fault is not None), None)


def _fault_of_name(device: Candidate, demand: Demand) -> str | None:
    if demand.name is not None and demand.name.lower() not in device.name.lower():
        return f"not named {demand.name!r}"
    entry = next((entry for entry in demand.exclude if _is_meant(device, entry)), None)
    return None if entry is None else f"excluded by {entry!r}"


def _is_meant(device: Candidate, entry: int | str) -> bool:
    if isinstance(entry, int):
        return device.index == entry
    return entry.lower() in device.name.lower() or entry.lower() in (device.uuid or "").lower()


def _fault_of_size(what: str, has_bytes: int | None, min_bytes: int | None) -> str | None:
    if min_bytes is None or (has_bytes is not None and has_bytes >= min_bytes):
        return None
    has = "unknown" if has_bytes is None else format_size(has_bytes)
    return f"{what} memory {has}, below {format_size(min_bytes)}"


def _fault_of_load(has_pct: float | None, max_pct: float | None) -> str | None:
    if max_pct is None or (has_pct is not None and has_pct <= max_pct):
        return None
    has = "unknown" if has_pct is None else f"{has_pct:g}%"
    return f"utilization {has}, above {max_pct:g}%"


def _explain(devices: Sequence[Candidate], reasons: Sequence[str | None], demand: Demand) -> str:
    required = f"{demand.num_required} fitting device{'s' if demand.num_required > 1 else ''}"
    if not devices:
        return (
            f"select_devices: {required} required, got none: this machine has no accelerator that can be "
            "seen. Ask for nothing to get the CPU, or check nvidia-smi and CUDA_VISIBLE_DEVICES."
        )
    return (
        f"select_devices: {required} required, got {list(reasons).count(None)} of {len(devices)}. "
        f"Ask for fewer or for less, or wait until they are free.\n{format_verdicts(devices, reasons)}"
    )


def format_verdicts(devices: Sequence[Candidate], reasons: Sequence[str | None]) -> str:
    """Lay out devices and what speaks against each, one a line, in columns."""
    rows = [("device", "name", "free", "total", "busy", "verdict")]
    for device, reason in zip(devices, reasons):
        busy = "?" if device.utilization_pct is None else f"{device.utilization_pct:g}%"
        free, total = format_size(device.free_memory_bytes), format_size(device.total_memory_bytes)
        rows.append((device.label, device.name, free, total, busy, reason or "fits"))
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
    return "\n".join(f"  {line.rstrip()}" for line in lines)
