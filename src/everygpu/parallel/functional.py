"""``DataParallel`` for a single call."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from everygpu.devices.parse import DeviceLike
from everygpu.parallel.data_parallel import DataParallel


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run a module on several devices once::

        output = everygpu.data_parallel(module, x)

    Args:
        module: Any ``torch.nn.Module``; see ``DataParallel``.
        inputs: Positional arguments: a tuple, or a single value.
        device_ids: As for ``DataParallel``.
        output_device: As for ``DataParallel``.
        dim: Where the rows of the batch are.
        module_kwargs: Keyword arguments.
    Returns:
        What the module returns for the whole batch.
    Raises:
        EveryGPUError: as ``DataParallel`` does.
    Source:
        ``torch.nn.parallel.data_parallel``. Replicas are made for this one call: in a loop, keep a
        ``DataParallel``.
    """
    model = DataParallel(module, device_ids, output_device, dim, engine="threads")
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    try:
        return model(*args, **(module_kwargs or {}))
    finally:
        model.release()
