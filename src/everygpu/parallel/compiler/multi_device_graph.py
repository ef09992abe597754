"""What a graph of Dynamo's was compiled to, with a version of its code for each GPU."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("everygpu")


class MultiDeviceGraph:
    """What Dynamo's graph was compiled to: forward, and backward by autograd."""

    def __init__(self, function: Callable[..., Any], parts: "Sequence[GraphPart]") -> None:
        self._function = function
        self._parts = parts

    def __call__(self, *inputs: Any) -> Any:
        return self._function(*inputs)

    def serves(self, device: torch.device) -> bool:
        """Tell whether it may be given inputs on this device."""
        return device.type == "cuda" and all(part.serves(device.index) for part in self._parts)


class GraphPart:
    """A forward or backward graph, with a version of its code for each GPU it has run on.

    Args:
        home: Index of the GPU it was compiled for; None when it is for no other.
        run: Takes a list of inputs, which it empties.
        load: Makes a version for another GPU.
    """

    def __init__(
        self,
        home: int | None,
        run: Callable[[list[Any]], Any] | None = None,
        load: "Callable[[int], Callable[[list[Any]], Any]] | None" = None,
    ) -> None:
        self._home = home
        self._load = load
        self._loading = threading.Lock()
        self._versions: dict[int, Callable[[list[Any]], Any]] = {} if home is None or run is None else {home: run}

    def serves(self, index: int) -> bool:
        """Tell whether it runs on a GPU: that it was compiled for, or one of the same kind."""
        if self._home is None or index in self._versions:
            return self._home is not None
        if not _is_same_kind(self._home, index):
            return False
        try:
            self._version(index)
        except Exception:  # torch's internals may have changed: the graph is compiled for that GPU instead
            logger.warning(
                "DataParallel: code compiled for cuda:%d can't be loaded for others", self._home, exc_info=True
            )
            self._home = None
        return self._home is not None

    def __call__(self, inputs: list[Any]) -> Any:
        return self._version(device_index_of(inputs))(inputs)

    def _version(self, index: int) -> Callable[[list[Any]], Any]:
        found = self._versions.get(index)
        if found is None:
            with self._loading:
                if index not in self._versions and self._load is not None:
                    self._versions[index] = self._load(index)
                found = self._versions[index]
        return found


def device_index_of(inputs: Sequence[Any]) -> int:
    """Find the GPU that a graph is to run on: that of its first input on one, or the current one."""
    for x in inputs:
        if isinstance(x, Tensor) and x.device.type == "cuda":
            return x.device.index
    return torch.cuda.current_device()


def _is_same_kind(a: int, b: int) -> bool:
    """Tell whether two GPUs run the same code: kernels are laid out for a number of multiprocessors."""
    if a == b:
        return True
    one, other = torch.cuda.get_device_properties(a), torch.cuda.get_device_properties(b)
    return all(
        getattr(one, name) == getattr(other, name) for name in ("name", "major", "minor", "multi_processor_count")
    )
