"""Match torch's devices to physical GPUs.

CUDA numbers the devices that ``CUDA_VISIBLE_DEVICES`` leaves, by default fastest first; NVML and nvidia-smi number all
of them in PCI order. Where torch is loaded, the two are matched by UUID; before that, by the driver's rules.
"""

import functools
import logging
import os
import re
from collections.abc import Mapping, Sequence
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

        for gpu in everygpu.devices.visible_devices():
            print(gpu.device, gpu.name, gpu.free_memory_bytes)

    Returns:
        The CUDA (or ROCm) devices in torch's order; else the one MPS or XPU device; else none. Initialises CUDA in this
        process, but makes a context, for free memory, only where NVML does not answer.
    Source:
        ``torch.cuda.get_device_properties`` matched to NVML by UUID; ``torch.accelerator`` for other kinds.
    """
    import torch

    if torch.cuda.is_available():
        samples = [] if torch.version.hip else nvml.sample_devices() or []
        for line in nvml.explain_lost(samples):
            logger.warning("%s", line)
        return [_describe(torch.device("cuda", index), samples) for index in range(torch.cuda.device_count())]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [] if accelerator is None else [_describe(accelerator, [])]


@functools.cache
def report_no_gpu() -> None:
    """Say once that training is on the CPU, and aloud where the driver shows GPUs that torch doesn't see."""
    import torch

    samples = nvml.sample_devices() or []
    if shown := pick_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), [gpu.uuid or "" for gpu in samples]):
        text = "torch %s sees no GPU, and the driver shows %d: training is on the CPU. `everygpu doctor` says why."
        logger.warning(text, torch.__version__, len(shown))
    else:
        logger.info("torch %s sees no GPU: training is on the CPU.", torch.__version__)


def _describe(device: "torch.device", samples: Sequence[DeviceSample]) -> DeviceSample:
    """Say what NVML knows of a device, else what torch does."""
    import torch

    found = DeviceSample(
        index=None, name=device.type.upper(), uuid=None, total_memory_bytes=None, free_memory_bytes=None
    )
    try:
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            uuid = str(properties.uuid).lower()
            is_instance = any(f"mig-{uuid}" == known.lower() for gpu in samples for known in gpu.instances)
            found = replace(found, name=properties.name, uuid=f"{'MIG' if is_instance else 'GPU'}-{properties.uuid}")
            found = next((gpu for gpu in samples if (gpu.uuid or "").lower() == f"gpu-{uuid}"), found)
        if found.fault is None and found.free_memory_bytes is None:
            # A GPU that shares the host's memory has no figures of its own: torch knows how much it may use.
            free, total = torch.accelerator.get_memory_info(device)
            found = replace(found, free_memory_bytes=free, total_memory_bytes=total)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if device.type == "cuda" and torch.version.hip is None:  # CUDA has lost it; MPS has no figures
            found = replace(found, fault=f"doesn't answer: {str(error).partition(chr(10))[0]}")
    return replace(found, device=device)


def pick_visible(text: str | None, uuids: Sequence[str]) -> list[int]:
    """Apply the driver's rules for ``CUDA_VISIBLE_DEVICES``: return positions in ``uuids``, in the order of CUDA."""
    if text is None:
        return list(range(len(uuids)))
    # CUDA programming guide, environment variables: the first entry decides whether these are indices or UUIDs; one of
    # the other kind, an unknown one, or a prefix that several devices share ends the list; the same device twice
    # empties it. As driver 580.159 does: an index ends before what is no digit, a space may follow a UUID.
    picked: list[int] = []
    for entry in text.split(","):
        if text.startswith("GPU-"):
            kind, rest = entry[:4], entry[4:].rstrip().lower()
            matches = [i for i, u in enumerate(uuids) if u[:4] == kind and u[4:].lower().startswith(rest)]
        else:
            number = _LEADING_NUMBER.match(entry)  # by float, as int refuses thousands of digits
            matches = [i for i in range(len(uuids)) if number is not None and i == float(number[1])]
        if len(matches) != 1:
            break
        if matches[0] in picked:
            return []
        picked += matches
    return picked


def resolve_environ(environ: Mapping[str, str], devices: Sequence[DeviceSample]) -> list[DeviceSample]:
    """Say which GPUs CUDA would use, by nvidia-smi's indices, before torch is loaded; log where CUDA's may differ."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is not None and _LEADING_NUMBER.match(text) and not has_known_order(environ, devices):
        logger.warning(
            "CUDA_VISIBLE_DEVICES=%s is read in PCI order, as nvidia-smi numbers GPUs; CUDA by default "
            "numbers the fastest first. Set CUDA_DEVICE_ORDER=PCI_BUS_ID to make both the same.",
            text,
        )
    return [devices[i] for i in pick_visible(text, [device.uuid or "" for device in devices])]


def has_known_order(environ: Mapping[str, str], devices: Sequence[DeviceSample]) -> bool:
    """Whether CUDA numbers the machine's GPUs in PCI order: unlike ones come fastest first by default."""
    names = {device.name for device in devices if device.fault is None}
    return environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(names) < 2


def predict_names(environ: Mapping[str, str], devices: Sequence[DeviceSample]) -> dict[str, str]:
    """Say by UUID what torch would call each device that CUDA would use; ``cuda:?`` where only CUDA knows."""
    by_uuid = environ.get("CUDA_VISIBLE_DEVICES", "").startswith("GPU-")
    is_known = by_uuid or (has_known_order(environ, devices) and not any(device.fault for device in devices))
    visible = [device for device in resolve_environ(environ, devices) if device.fault is None]
    return {device.uuid or "": f"cuda:{i if is_known else '?'}" for i, device in enumerate(visible)}
