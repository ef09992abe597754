"""Match torch's devices to physical GPUs.

CUDA numbers the devices that ``CUDA_VISIBLE_DEVICES`` leaves, by default fastest first; NVML and nvidia-smi number all
of them in PCI order. Where torch is loaded, the two are matched by UUID; before that, by the driver's rules.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everygpu.devices import nvml
from everygpu.devices.nvml import DeviceSample

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("everygpu")
_LEADING_NUMBER = re.compile(r"\s*([+-]?[0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleDevice:
    """A device that torch can use, and the physical device it is."""

    device: "torch.device"
    """The logical device, as in ``tensor.to(device)``."""
    index: int | None
    """``nvidia-smi --query-gpu=index``; None when unknown or no GPU of NVIDIA's."""
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
        """``cuda:0 (GPU 2)``."""
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
        ``torch.cuda.get_device_properties`` matched to NVML by UUID; ``torch.accelerator`` for other kinds.
    """
    import torch

    if torch.cuda.is_available():
        samples = [] if torch.version.hip else nvml.sample_devices() or []
        return [_describe(torch.device("cuda", index), samples) for index in range(torch.cuda.device_count())]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    total, free = _ask_memory(accelerator)
    name = accelerator.type.upper()
    return [VisibleDevice(device=accelerator, index=None, name=name, uuid=None,
                          total_memory_bytes=total, free_memory_bytes=free)]  # fmt: skip


def _describe(device: "torch.device", samples: Sequence[DeviceSample]) -> VisibleDevice:
    import torch

    properties = torch.cuda.get_device_properties(device)
    # torch gives the bare UUID, NVML puts GPU- or MIG- in front.
    everything = [part for gpu in samples for part in (gpu, *(gpu.mig_instances or ()))]
    sample = next((part for part in everything if part.uuid[4:].lower() == str(properties.uuid).lower()), None)
    # A GPU that shares the host's memory has no figures of its own: torch knows how much it may use.
    has_memory = sample is not None and sample.free_memory_bytes is not None
    total, free = (
        (sample.total_memory_bytes, sample.free_memory_bytes) if sample and has_memory else _ask_memory(device)
    )
    return VisibleDevice(
        device=device,
        index=None if sample is None else sample.index,
        name=properties.name if sample is None else sample.name,
        uuid=f"GPU-{properties.uuid}" if sample is None else sample.uuid,
        total_memory_bytes=total,
        free_memory_bytes=free,
        utilization_pct=None if sample is None else sample.utilization_pct,
        processes=() if sample is None else sample.processes,
    )


def _ask_memory(device: "torch.device") -> tuple[int | None, int | None]:
    """Total and free bytes as torch knows them; None where its backend doesn't (MPS)."""
    import torch

    try:
        free, total = torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError):
        return None, None
    return total, free


def pick_visible(text: str | None, uuids: Sequence[str]) -> list[int]:
    """Apply the driver's rules for ``CUDA_VISIBLE_DEVICES``.

    The first entry decides whether the list holds indices or UUIDs; an entry of the other kind, an unknown one, or a
    prefix that several devices share ends the list before it. The same device twice empties the list.

    Args:
        text: The variable's value; None when it is not set, which leaves every device visible.
        uuids: One per device, in the order in which CUDA numbers the whole machine.
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
    """Say which devices CUDA would use under a value of ``CUDA_VISIBLE_DEVICES``, in the order of its numbers.

    Args:
        text: The variable's value; None when it is not set.
        devices: Every GPU, in the order in which CUDA numbers the whole machine.
    Returns:
        GPUs and MIG instances. A GPU in MIG mode stands for its first instance, and is left out while it has none.
    Source:
        ``pick_visible``; MIG user guide, "CUDA device enumeration".
    """
    by_instance = text is not None and text.startswith("MIG-")
    candidates = [part for gpu in devices for part in gpu.mig_instances or ()] if by_instance else devices
    picked = [candidates[i] for i in pick_visible(text, [candidate.uuid for candidate in candidates])]
    usable = [(gpu,) if gpu.mig_instances is None else gpu.mig_instances[:1] for gpu in picked]
    return [part for parts in usable for part in parts]


def resolve_environ(environ: Mapping[str, str], devices: Sequence[DeviceSample]) -> list[DeviceSample]:
    """Say which devices CUDA would use under an environment, before torch is loaded.

    Args:
        environ: As ``os.environ``.
        devices: Every GPU, in PCI order.
    Returns:
        As ``resolve_visible``. Indices are read in PCI order; where that may not be CUDA's, a log line says so.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is not None and _LEADING_NUMBER.match(text) and not has_known_order(environ, devices):
        logger.warning(
            "CUDA_VISIBLE_DEVICES=%s is read in PCI order, as nvidia-smi numbers GPUs; CUDA by default "
            "numbers the fastest first. Set CUDA_DEVICE_ORDER=PCI_BUS_ID to make both the same.",
            text,
        )
    return resolve_visible(text, devices)


def has_known_order(environ: Mapping[str, str], devices: Sequence[DeviceSample]) -> bool:
    """Tell whether CUDA numbers the machine's GPUs in PCI order: unlike ones come fastest first by default."""
    return environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({device.name for device in devices}) < 2


def predict_names(environ: Mapping[str, str], devices: Sequence[DeviceSample]) -> dict[str, str]:
    """Say what torch would call each device that CUDA would use, by UUID, without loading torch.

    Returns:
        ``cuda:0`` and so on, in this order; ``cuda:?`` where the order is not known before CUDA is asked.
    """
    by_uuid = environ.get("CUDA_VISIBLE_DEVICES", "").startswith(("GPU-", "MIG-"))
    is_known = by_uuid or has_known_order(environ, devices)
    visible = resolve_environ(environ, devices)
    return {device.uuid: f"cuda:{i if is_known else '?'}" for i, device in enumerate(visible)}
