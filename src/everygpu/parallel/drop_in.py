"""What code finds that looks at ``torch.nn.DataParallel``: its attributes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch.nn import DataParallel as TorchDataParallel

from everygpu.devices.parse import DeviceLike, device_id, parse_devices, parse_target
from everygpu.errors import ModuleError
from everygpu.parallel.wrapper import ModuleWrapper


class DropIn(ModuleWrapper, TorchDataParallel):  # type: ignore[type-arg]
    """Gives a wrapper ``torch.nn.DataParallel``'s attributes. A subclass sets what is annotated here."""

    replica_devices: tuple[torch.device, ...]
    """One per replica; ``device_ids`` names them as torch does."""
    _output_device: torch.device

    if TYPE_CHECKING:

        def release(self) -> None: ...

    def __init__(self) -> None:
        # Not torch's own, which moves the module and knows no CPU. What follows it in a subclass is called, as there.
        # By a name of this file's, as ``torch.nn.DataParallel = everygpu.DataParallel`` makes libraries' classes ours.
        super(TorchDataParallel, self).__init__()

    def __prepare_scriptable__(self) -> NoReturn:
        raise ModuleError(
            "DataParallel: torch.jit.script needs a module without the wrapper, got a DataParallel. Script the module "
            "itself: torch.jit.script(model.module)."
        )

    # What it is.

    @property  # type: ignore[override]
    def device_ids(self) -> list[int | torch.device]:
        """The replicas' devices: ints for CUDA, as of ``torch.nn.DataParallel``, else ``torch.device``."""
        return [device_id(device) for device in self.replica_devices]

    @device_ids.setter
    def device_ids(self, value: Sequence[DeviceLike]) -> None:
        self.replica_devices = tuple(parse_devices(value))
        if "_lock" in vars(self):
            self.release()

    @property  # type: ignore[override]
    def output_device(self) -> int | torch.device:
        """Where outputs go: an int for CUDA, as of ``torch.nn.DataParallel``, else a ``torch.device``."""
        return device_id(self._output_device)

    @output_device.setter
    def output_device(self, value: DeviceLike) -> None:
        self._output_device = parse_target(value)

    @property
    def output_device_obj(self) -> torch.device:
        """``output_device`` as a ``torch.device``."""
        return self._output_device

    @property
    def src_device_obj(self) -> torch.device:  # type: ignore[override]
        """The device of the module's parameters and buffers."""
        return self.replica_devices[0]
