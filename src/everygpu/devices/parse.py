"""Parse device names and indices into ``torch.device`` objects that exist."""

import operator
import os
import re
from collections.abc import Iterable
from typing import SupportsIndex, TypeAlias

import torch

from everygpu.errors import DeviceError

DeviceLike: TypeAlias = int | SupportsIndex | str | torch.device
"""A CUDA index, a name such as ``"cuda:1"`` or ``"cpu"``, or a ``torch.device``."""


def parse_devices(
    device_ids: DeviceLike | Iterable[DeviceLike] | None, *, may_repeat: bool = False
) -> list[torch.device]:
    """Turn device ids into the replicas' devices, of one type; None is all of CUDA, else the accelerator or the CPU.

    ``may_repeat``: a GPU may be named several times.
    """
    if device_ids is None:
        if torch.cuda.is_available():
            return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        accelerator = _accelerator()
        return [torch.device("cpu") if accelerator is None else parse_device(accelerator)]
    if isinstance(device_ids, (str, torch.device)) or not isinstance(device_ids, Iterable):
        return [parse_device(device_ids)]
    devices = [parse_device(entry) for entry in device_ids]
    if not devices:
        raise DeviceError("device_ids is empty. Pass None for every device.")
    if len(kinds := sorted({device.type for device in devices})) > 1:
        names = [str(device) for device in devices]
        raise DeviceError(f"device_ids mixes {' and '.join(kinds)}: {names}. Leave out one or the other.")
    doubled = sorted({str(device) for device in devices if devices.count(device) > 1})
    if doubled and kinds != ["cpu"] and not (may_repeat or may_share_gpus()):
        raise DeviceError(
            f"device_ids names {', '.join(doubled)} twice. Pass num_replicas for several replicas on one."
        )
    return devices


def parse_device(device: DeviceLike) -> torch.device:
    """Turn a device id into one that exists, with its index; ``torch.device`` makes ``cuda:44`` of ``"cuda:300"``."""
    kind, index = _read(device)
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "meta":
        raise DeviceError(f"Tensors on {device!r} have no values to train. This machine has {_inventory()}.")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(f"No CUDA for the device {device!r}. {_why_no_cuda()} This machine has {_inventory()}.")
        count = torch.cuda.device_count()
    else:
        if (accelerator := _accelerator()) is None or accelerator.type != kind:
            raise DeviceError(f"This machine has no {device!r}. It has {_inventory()}.")
        count = torch.accelerator.device_count()
    if index is None:
        return torch.device(kind, torch.accelerator.current_device_index())
    if not 0 <= index < count:
        span = "0" if count == 1 else f"0 to {count - 1}"
        raise DeviceError(f"No device {device!r}: {kind} has {count} here. Use {span}, or check CUDA_VISIBLE_DEVICES.")
    return torch.device(kind, index)


def parse_target(device: DeviceLike) -> torch.device:
    """Turn the device that outputs go to into a device that exists; -1 is the CPU, as in ``torch.nn.parallel``."""
    is_cpu = isinstance(device, SupportsIndex) and not isinstance(device, bool) and operator.index(device) == -1
    return torch.device("cpu") if is_cpu else parse_device(device)


def device_id(device: torch.device) -> int | torch.device:
    """Return a device as ``torch.nn.DataParallel`` names it: a CUDA device by its index, others as they are."""
    return device.index if device.type == "cuda" else device


def may_share_gpus() -> bool:
    """Whether tests have said that replicas and ranks may share a GPU: CONTRIBUTING.md, ``EVERYGPU_SHARE_GPU``."""
    return os.environ.get("EVERYGPU_SHARE_GPU") == "1"


def _read(device: object) -> tuple[str, int | None]:
    """Parse a device id."""
    if isinstance(device, torch.device):
        return device.type, device.index
    if isinstance(device, SupportsIndex) and not isinstance(device, bool):
        return "cuda", operator.index(device)
    if not isinstance(device, str):
        raise DeviceError(f"{device!r} is no device. Pass an int, a str or a torch.device: [0, 1], ['cuda:0', 'cpu'].")
    match = re.fullmatch(r"([a-z]+)(?::([0-9]+))?", device)
    # The machine is asked last: that starts the CUDA driver, and naming the CPU must not.
    if match and (match[1] in ("cpu", "cuda", "mps", "xpu", "meta") or match[1] == getattr(_accelerator(), "type", "")):
        return match[1], None if match[2] is None else int(match[2])
    raise DeviceError(f"{device!r} is no device name; 'cuda:0' is one. This machine has {_inventory()}.")


def _why_no_cuda() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without it: install a CUDA build, or use 'cpu'."
    return "Check nvidia-smi and CUDA_VISIBLE_DEVICES, or use 'cpu'."


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)


def _inventory() -> str:
    """Say what devices there are: ``"'cpu' and 2 of 'cuda'"``."""
    if (accelerator := _accelerator()) is None:
        return "only 'cpu'"
    return f"'cpu' and {torch.accelerator.device_count()} of {accelerator.type!r}"
