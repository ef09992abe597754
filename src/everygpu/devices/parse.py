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

_NAME = re.compile(r"([a-z]+)(?::([0-9]+))?")
_OTHER_NAME = re.compile(r"(?:gpu|cuda|nvidia|hip|rocm)[\s:_-]*([0-9]*)", re.IGNORECASE)
"""How GPUs are named elsewhere: ``"gpu:0"``, ``"GPU"``, ``"cuda0"``."""


def parse_devices(device_ids: DeviceLike | Iterable[DeviceLike] | None) -> list[torch.device]:
    """Turn device ids into the devices of the replicas, in the order given.

    Args:
        device_ids: CUDA indices, names, ``torch.device`` objects, in any mix; or one of them. None for
            every CUDA device, else the one accelerator, else the CPU. ``["cpu", "cpu"]`` gives two CPU
            replicas.
    Returns:
        One device per replica, all of one type. Accelerators have an index; the CPU has none.
    Raises:
        DeviceError: an entry is no device or does not exist, a GPU is named twice, the types are mixed,
            or there is no entry.
    Source:
        ``torch.nn.DataParallel``'s ``device_ids``, which also takes the CPU for nothing but an error.
    """
    if device_ids is None:
        return _every_device()
    if _is_one(device_ids):
        return [parse_device(device_ids)]  # type: ignore[arg-type]
    devices = [parse_device(entry) for entry in device_ids]  # type: ignore[union-attr]
    _check_together(devices)
    return devices


def parse_device(device: DeviceLike) -> torch.device:
    """Turn one device id into a device that exists.

    Args:
        device: A CUDA index, a name, or a ``torch.device``. Without an index the current device is meant.
    Returns:
        An accelerator with its index, or plain ``cpu``.
    Raises:
        DeviceError: it is no device, or this machine doesn't have it.
    Source:
        ``torch.device``, which wraps large indices (``"cuda:300"`` becomes ``cuda:44``) and checks none.
    """
    kind, index = _read(device)
    if kind == "cpu":
        return torch.device("cpu")
    _check_kind(kind, device)
    count = _count(kind)
    if index is None:
        return torch.device(kind, torch.accelerator.current_device_index())
    if not 0 <= index < count:
        raise DeviceError(
            f"parse_devices: an index of {kind} must be below the number of its devices, {count} here, "
            f"got {device!r}. Use {_span(count)}, or check CUDA_VISIBLE_DEVICES."
        )
    return torch.device(kind, index)


def parse_target(device: DeviceLike) -> torch.device:
    """Turn the device that outputs go to into a device that exists: as ``parse_device``, and -1 for the CPU.

    Source:
        ``torch.nn.parallel.gather``.
    """
    is_index = isinstance(device, SupportsIndex) and not isinstance(device, bool)
    return torch.device("cpu") if is_index and operator.index(device) == -1 else parse_device(device)  # type: ignore[arg-type]


def device_id(device: torch.device) -> int | torch.device:
    """Return a device as ``torch.nn.DataParallel`` names it: a CUDA device by its index, others as they are."""
    return device.index if device.type == "cuda" else device


def may_share_gpus() -> bool:
    """Tell whether tests have said that replicas and ranks may share a GPU: CONTRIBUTING.md, ``EVERYGPU_SHARE_GPU``."""
    return os.environ.get("EVERYGPU_SHARE_GPU") == "1"


def _every_device() -> list[torch.device]:
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    accelerator = _accelerator()
    return [torch.device("cpu") if accelerator is None else parse_device(accelerator)]


def _is_one(device_ids: object) -> bool:
    return isinstance(device_ids, (str, torch.device)) or not isinstance(device_ids, Iterable)


def _read(device: object) -> tuple[str, int | None]:
    """Take a device id apart, without asking whether it exists."""
    if isinstance(device, torch.device):
        return device.type, device.index
    if isinstance(device, str):
        return _read_name(device)
    if isinstance(device, SupportsIndex) and not isinstance(device, bool):
        return "cuda", operator.index(device)
    raise DeviceError(
        f"parse_devices: a device must be an int, a str or a torch.device, got {device!r} of type "
        f"{type(device).__name__}. Write for example [0, 1] or ['cuda:0', 'cuda:1']."
    )


def _read_name(name: str) -> tuple[str, int | None]:
    match = _NAME.fullmatch(name)
    if match is None or not _is_kind(match[1]):
        raise DeviceError(
            f"parse_devices: a device name must be a type and an index, such as 'cuda:0', got {name!r}. "
            f"{_suggest(name)}This machine has {_inventory()}."
        )
    return match[1], None if match[2] is None else int(match[2])


def _suggest(name: str) -> str:
    """Say which device of this machine a name may mean, with a space after it; nothing where there is none."""
    match, accelerator = _OTHER_NAME.fullmatch(name.strip()), _accelerator()
    if match is None:
        return ""
    kind = "cuda" if accelerator is None else accelerator.type
    meant = f"{kind}:{int(match[1])}" if match[1] else kind
    return f"Did you mean {meant!r}? "


def _is_kind(name: str) -> bool:
    """Tell a type that machines can have, whose absence has a better message, from a slip of the pen."""
    # The machine is asked last: that starts the CUDA driver, and naming the CPU must not.
    return name in ("cpu", "cuda", "mps", "xpu", "meta") or ((here := _accelerator()) is not None and here.type == name)


def _check_kind(kind: str, device: object) -> None:
    if kind == "meta":
        raise DeviceError(
            f"parse_devices: a device must hold values, got {device!r}, whose tensors have none: it is no device "
            f"to train on. This machine has {_inventory()}."
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f"parse_devices: CUDA must be available for a CUDA device, got {device!r}. {_why_no_cuda()} "
            f"This machine has {_inventory()}."
        )
    accelerator = _accelerator()
    if kind != "cuda" and (accelerator is None or accelerator.type != kind):
        raise DeviceError(
            f"parse_devices: a device must be of a type that this machine has, got {device!r}. It has {_inventory()}."
        )


def _why_no_cuda() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without it: install a CUDA build, or use 'cpu'."
    return "Check nvidia-smi and CUDA_VISIBLE_DEVICES, or use 'cpu'."


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)


def _count(kind: str) -> int:
    return torch.cuda.device_count() if kind == "cuda" else torch.accelerator.device_count()


def _inventory() -> str:
    """Say what devices there are, for a message: ``"'cpu' and 2 of 'cuda'"``."""
    accelerator = _accelerator()
    return "only 'cpu'" if accelerator is None else f"'cpu' and {_count(accelerator.type)} of {accelerator.type!r}"


def _span(count: int) -> str:
    return "0" if count == 1 else f"0 to {count - 1}"


def _check_together(devices: list[torch.device]) -> None:
    if not devices:
        raise DeviceError(
            "parse_devices: at least one device is required, got an empty list. Pass None for every device."
        )
    kinds = sorted({device.type for device in devices})
    if len(kinds) > 1:
        raise DeviceError(
            f"parse_devices: all devices must be of one type, got {' and '.join(kinds)} in "
            f"{[str(device) for device in devices]}. Leave out one or the other."
        )
    doubled = sorted({str(device) for device in devices if devices.count(device) > 1})
    if doubled and kinds != ["cpu"] and not may_share_gpus():
        raise DeviceError(
            f"parse_devices: each {kinds[0]} device can hold one replica, got {', '.join(doubled)} more than "
            "once. Name each device once; only the CPU can be named several times."
        )
