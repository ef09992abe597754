"""Which devices there are, which of them to use, and the seeds they draw from.

Names are imported on first use: ``everygpu run`` chooses devices with ``select`` and ``nvml`` before torch
is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everygpu.devices.parse import parse_device as parse_device
    from everygpu.devices.parse import parse_devices as parse_devices
    from everygpu.devices.seed import seed_all as seed_all
    from everygpu.devices.seed import spread_seeds as spread_seeds
    from everygpu.devices.select import select_devices as select_devices
    from everygpu.devices.speed import measure_shares as measure_shares
    from everygpu.devices.visible import visible_devices as visible_devices

_HOME = {
    "measure_shares": "speed",
    "parse_device": "parse",
    "parse_devices": "parse",
    "seed_all": "seed",
    "select_devices": "select",
    "spread_seeds": "seed",
    "visible_devices": "visible",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
