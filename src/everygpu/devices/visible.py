"""Match logical devices to physical GPUs.

CUDA numbers the devices that ``CUDA_VISIBLE_DEVICES`` leaves, by default fastest first; NVML and
nvidia-smi number all of them in PCI order. Where torch can be asked, the two are matched by UUID; before
torch is loaded, the driver's rules for the variable are applied here.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everygpu.devices import nvml
from everygpu.devices.nvml import DeviceSample

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("everygpu")
_LEADING_NUMBER = re.compile(r"\s*([+-]?[0-9]+)")
_MOST_GPUS = 64  # torch's own limit, for a driver that can't be asked how many there are


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleDevice:
    """A device that torch can use, and the physical device it is."""

    device: "torch.device"
    """The logical device, as in ``tensor.to(device)``."""
    index: int | None
    """``nvidia-smi --query-gpu=index``; None when unknown or no GPU of NVIDIA's or AMD's."""
    name: str
    """``torch.cuda.get_device_name``, which is ``nvidia-smi --query-gpu=name``."""
    uuid: str | None
    """``nvidia-smi --query-gpu=uuid``."""
    total_memory_bytes: int | None
    """``nvidia-smi --query-gpu=memory.total``, or what torch may use of it when NVML doesn't answer."""
    free_memory_bytes: int | None
    """``nvidia-smi --query-gpu=memory.free``, or ``torch.cuda.mem_get_info``."""
    utilization_pct: float | None = None
    """``nvidia-smi --query-gpu=utilization.gpu``: 0 to 100; None when not reported."""
    processes: tuple[tuple[int, int | None], ...] = ()
    """``nvidia-smi --query-compute-apps=pid,used_memory``: pid and bytes."""

    @property
    def label(self) -> str:
        """How a table for people calls this device: logical, and physical where known."""
        return str(self.device) if self.index is None else f"{self.device} (GPU {self.index})"


def visible_devices() -> list[VisibleDevice]:
    """List the accelerators torch can use, with the physical device behind each.

    ::

        for device in everygpu.visible_devices():
            print(device)

    Returns:
        The CUDA (or ROCm) devices in torch's order; else the one MPS or XPU device; else an empty list,
        for the CPU is always there and is no accelerator. Initialises CUDA in this process. It makes no
        CUDA context, except where NVML does not answer: then free memory takes one on each device.
    Source:
        ``torch.cuda.get_device_properties`` matched to NVML by UUID, else by PCI address;
        ``torch.accelerator`` for other kinds.
    """
    import torch

    if torch.cuda.is_available():
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        return _describe_rocm(devices) if torch.version.hip else _describe_cuda(devices)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [] if accelerator is None else [_describe_other(accelerator)]


def pick_visible(text: str | None, uuids: Sequence[str]) -> list[int]:
    """Apply the driver's rules for ``CUDA_VISIBLE_DEVICES``.

    The first entry decides whether the list holds indices or UUIDs; an entry of the other kind, an
    unknown one, or a prefix that several devices share ends the list before it. The same device twice
    empties the list.

    Args:
        text: The variable's value; None when it is not set, which leaves every device visible.
        uuids: One per device, in the order in which CUDA numbers the whole box.
    Returns:
        Positions in ``uuids``, in the order in which CUDA numbers what is left.
    Source:
        CUDA programming guide, environment variables; where it is silent, what driver 580.159 does on
        two H200s: an index ends at the first character that is no digit and wraps at 2**32, UUIDs
        match in any case and may be followed, not preceded, by a space.
    """
    if text is None:
        return list(range(len(uuids)))
    by_uuid = text.startswith(("GPU-", "MIG-"))
    picked: list[int] = []
    for entry in text.split(","):
        position = _match_uuid(entry, uuids) if by_uuid else _match_index(entry, len(uuids))
        if position is None:
            break
        if position in picked:
            return []
        picked.append(position)
    return picked


def _match_index(entry: str, num_devices: int) -> int | None:
    number = _LEADING_NUMBER.match(entry)
    if number is None or int(number[1]) < 0:
        return None
    index = int(number[1]) % 2**32
    return index if index < num_devices else None


def _match_uuid(entry: str, uuids: Sequence[str]) -> int | None:
    entry = entry.rstrip()
    kind, rest = entry[:4], entry[4:].lower()
    matches = [i for i, uuid in enumerate(uuids) if uuid[:4] == kind and uuid[4:].lower().startswith(rest)]
    return matches[0] if len(matches) == 1 else None


def resolve_visible(text: str | None, devices: Sequence[DeviceSample]) -> list[DeviceSample]:
    """Say which devices of a box CUDA would use under a value of ``CUDA_VISIBLE_DEVICES``.

    Args:
        text: The variable's value; None when it is not set.
        devices: Every GPU, in the order in which CUDA numbers the whole box.
    Returns:
        GPUs and MIG instances, in the order in which CUDA numbers them. A GPU in MIG mode stands for its
        first instance, and is left out while it has none.
    Source:
        ``pick_visible``; MIG user guide, "CUDA device enumeration".
    """
    by_instance = text is not None and text.startswith("MIG-")
    instances = [instance for gpu in devices for instance in gpu.mig_instances or ()]
    candidates = instances if by_instance else devices
    picked = [candidates[i] for i in pick_visible(text, [candidate.uuid for candidate in candidates])]
    return [usable for device in picked if (usable := _usable_part(device)) is not None]


def _usable_part(device: DeviceSample) -> DeviceSample | None:
    if device.mig_instances is None:
        return device
    return device.mig_instances[0] if device.mig_instances else None


def resolve_environ(environ: Mapping[str, str], devices: Sequence[DeviceSample]) -> list[DeviceSample]:
    """Say which devices CUDA would use under an environment, before torch is loaded.

    Args:
        environ: As ``os.environ``.
        devices: Every GPU, in PCI order.
    Returns:
        As ``resolve_visible``. On a box with unlike GPUs CUDA's own order is not known before CUDA is
        asked: indices are then read in PCI order, with a log line.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    by_index = text is not None and _LEADING_NUMBER.match(text) is not None
    unlike = len({device.name for device in devices}) > 1
    if by_index and unlike and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        logger.warning(
            "CUDA_VISIBLE_DEVICES=%s is read in PCI order, as nvidia-smi numbers GPUs; CUDA by default "
            "numbers the fastest first. Set CUDA_DEVICE_ORDER=PCI_BUS_ID to make both the same.",
            text,
        )
    return resolve_visible(text, devices)


def resolve_rocm(environ: Mapping[str, str], uuids: Sequence[str]) -> list[int]:
    """Say which AMD GPUs HIP would use under an environment.

    Args:
        environ: As ``os.environ``.
        uuids: One per GPU of the box, in the order of rocm-smi.
    Returns:
        Positions in ``uuids``, in HIP's order.
    Source:
        ROCm's documentation on GPU isolation: ``ROCR_VISIBLE_DEVICES`` first, then
        ``HIP_VISIBLE_DEVICES`` counts in what that leaves; HIP reads ``CUDA_VISIBLE_DEVICES`` for it.
    """
    left = pick_visible(environ.get("ROCR_VISIBLE_DEVICES"), uuids)
    text = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
    return [left[i] for i in pick_visible(text, [uuids[position] for position in left])]


def match_sample(properties: Any, samples: Sequence[DeviceSample]) -> DeviceSample | None:
    """Find the physical device behind ``torch.cuda.get_device_properties``.

    Args:
        properties: Of one logical device.
        samples: Every GPU of the box, in any order.
    Returns:
        The sample with the same UUID, else with the same PCI address, else None.
    """
    everything = [device for gpu in samples for device in (gpu, *(gpu.mig_instances or ()))]
    for device in everything:
        # torch gives the bare UUID, NVML puts GPU- or MIG- in front.
        if device.uuid[4:].lower() == str(properties.uuid).lower():
            return device
    address = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return next((gpu for gpu in samples if _parse_pci(gpu.pci_bus_id) == address), None)


def _parse_pci(pci_bus_id: str) -> tuple[int, int, int]:
    domain, bus, slot = pci_bus_id.split(":")
    return int(domain, 16), int(bus, 16), int(slot.split(".")[0], 16)


def _describe_cuda(devices: "list[torch.device]") -> list[VisibleDevice]:
    import torch

    samples = nvml.sample_devices() or []
    described = []
    for device in devices:
        properties = torch.cuda.get_device_properties(device)
        sample = match_sample(properties, samples)
        described.append(_from_torch(device) if sample is None else _from_sample(device, sample))
    return described


def _from_sample(device: "torch.device", sample: DeviceSample) -> VisibleDevice:
    if sample.free_memory_bytes is None:  # a GPU that shares the host's memory: torch knows how much
        total, free = _ask_memory(device)
    else:
        total, free = sample.total_memory_bytes, sample.free_memory_bytes
    return VisibleDevice(
        device=device,
        index=sample.index,
        name=sample.name,
        uuid=sample.uuid,
        total_memory_bytes=total,
        free_memory_bytes=free,
        utilization_pct=sample.utilization_pct,
        processes=sample.processes,
    )


def _describe_rocm(devices: "list[torch.device]") -> list[VisibleDevice]:
    indices = resolve_rocm(os.environ, [""] * _MOST_GPUS)
    known = len(indices) >= len(devices)
    return [_from_torch(device, indices[i] if known else None) for i, device in enumerate(devices)]


def _from_torch(device: "torch.device", index: int | None = None) -> VisibleDevice:
    import torch

    properties = torch.cuda.get_device_properties(device)
    total, free = _ask_memory(device)
    return VisibleDevice(
        device=device,
        index=index,
        name=properties.name,
        uuid=f"GPU-{properties.uuid}",
        total_memory_bytes=total,
        free_memory_bytes=free,
    )


def _describe_other(device: "torch.device") -> VisibleDevice:
    total, free = _ask_memory(device)
    return VisibleDevice(
        device=device,
        index=None,
        name=device.type.upper(),
        uuid=None,
        total_memory_bytes=total,
        free_memory_bytes=free,
    )


def _ask_memory(device: "torch.device") -> tuple[int | None, int | None]:
    """Total and free bytes as torch knows them; None where its backend doesn't (MPS)."""
    import torch

    try:
        free, total = torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError):
        return None, None
    return total, free
