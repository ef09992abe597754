"""Which devices there are, which of them to use, and the seeds they draw from.

``everygpu run`` chooses devices with ``select``, ``visible`` and ``nvml`` before torch is loaded.
"""

from everygpu.devices.select import select_devices
from everygpu.devices.visible import visible_devices

__all__ = ["select_devices", "visible_devices"]
