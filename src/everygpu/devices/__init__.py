"""Which devices there are, which of them to use, and the seeds they draw from.

1. Devices are named as torch names them, and checked; an error says what the machine has.
2. GPUs are chosen before torch is loaded, and their figures are read without a CUDA context.
3. A physical GPU and torch's index are matched by UUID. A lost GPU keeps its position and is never chosen.
4. A choice that can't be met lists the reason for each GPU. Two runs never choose the same GPU.
5. Copies between GPUs are tested once per boot; where they fail, copies go through host memory.
6. One seed repeats a run, replicas draw different numbers, and the states of all generators can be restored.
7. `everygpu doctor` finds what keeps GPUs from working or makes them slow.
"""

from everygpu.devices.select import select_devices
from everygpu.devices.visible import visible_devices

__all__ = ["select_devices", "visible_devices"]
