"""Match torch's devices to physical GPUs.

CUDA numbers the devices that ``CUDA_VISIBLE_DEVICES`` leaves, by default fastest first; NVML and nvidia-smi number all
of them in PCI order. Where torch is loaded, the two are matched by UUID; before that, by the driver's rules.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from everygpu.devices import nvml
from everygpu.devices.nvml import DeviceSample

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("everygpu")
_LEADING_NUMBER = re.compile(r"\s*([+-]?[0-9]+)")


def visible_devices() -> list[DeviceSample]:
    """List the accelerators torch can use, with the physical device behind each.

    ::

        for gpu in everygpu.visible_devices():
            print(gpu.device, gpu.name, gpu.free_memory_bytes)

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
    return [_describe_by_torch(accelerator, accelerator.type.upper(), None)]


def _describe(device: "torch.device", samples: Sequence[DeviceSample]) -> DeviceSample:
    import torch

    properties = torch.cuda.get_device_properties(device)
    uuid = f"GPU-{properties.uuid}"
    # torch gives the bare UUID, NVML puts GPU- or MIG- in front.
    everything = [part for gpu in samples for part in (gpu, *(gpu.mig_instances or ()))]
    sample = next((part for part in everything if (part.uuid or "")[4:].lower() == uuid[4:].lower()), None)
    if sample is not None and sample.free_memory_bytes is not None:
        return replace(sample, device=device)
    # A GPU that shares the host's memory has no figures of its own: torch knows how much it may use.
    by_torch = _describe_by_torch(device, properties.name, uuid)
    if sample is None:
        return by_torch
    total, free = by_torch.total_memory_bytes, by_torch.free_memory_bytes
    return replace(sample, device=device, total_memory_bytes=total, free_memory_bytes=free)


def _describe_by_torch(device: "torch.device", name: str, uuid: str | None) -> DeviceSample:
    import torch

    memory: tuple[int | None, int | None] = (None, None)
    with suppress(RuntimeError, NotImplementedError):  # MPS
        memory = torch.accelerator.get_memory_info(device)
    return DeviceSample(
        index=None, name=name, uuid=uuid, total_memory_bytes=memory[1], free_memory_bytes=memory[0], device=device
    )


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
        position = _match_uuid(entry.rstrip(), uuids) if by_uuid else _match_index(entry, len(uuids))
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
    kind, rest = entry[:4], entry[4:].lower()
    matches = [i for i, uuid in enumerate(uuids) if uuid[:4] == kind and uuid[4:].lower().startswith(rest)]
    return matches[0] if len(matches) == 1 else None


def resolve_environ(environ: Mapping[str, str], devices: Sequence[DeviceSample]) -> list[DeviceSample]:
    """Say which devices CUDA would use under an environment, in the order of its numbers, before torch is loaded.

    Args:
        environ: As ``os.environ``.
        devices: Every GPU, in PCI order. Indices are read in it; where CUDA's may differ, a log line says so.
    Returns:
        GPUs and MIG instances. A GPU in MIG mode stands for its first instance, and is left out while it has none.
    Source:
        ``pick_visible``; MIG user guide, "CUDA device enumeration".
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is not None and _LEADING_NUMBER.match(text) and not has_known_order(environ, devices):
        logger.warning(
            "CUDA_VISIBLE_DEVICES=%s is read in PCI order, as nvidia-smi numbers GPUs; CUDA by default "
            "numbers the fastest first. Set CUDA_DEVICE_ORDER=PCI_BUS_ID to make both the same.",
            text,
        )
    by_instance = text is not None and text.startswith("MIG-")
    candidates = [part for gpu in devices for part in gpu.mig_instances or ()] if by_instance else devices
    picked = [candidates[i] for i in pick_visible(text, [candidate.uuid or "" for candidate in candidates])]
    return [part for gpu in picked for part in ((gpu,) if gpu.mig_instances is None else gpu.mig_instances[:1])]


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
    return {device.uuid or "": f"cuda:{i if is_known else '?'}" for i, device in enumerate(visible)}
