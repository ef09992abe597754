"""Outputs that are no containers but have tensors in them, such as a transformer's cache of keys and values."""

import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Opaque:
    """An object that each launch makes anew, with the launch's tensors in place of those that were recorded.

    Args:
        value: Whose state can be pickled.
    Raises:
        Exception: it can't be, or has a parameter or another kind of tensor in it.
    """

    def __init__(self, value: Any) -> None:
        self.tensors: list[Tensor] = []
        state = io.BytesIO()
        _Pickler(state, self.tensors).dump(value)
        self._state = state.getvalue()

    def make(self, tensors: Iterator[Tensor]) -> Any:
        """Make the object.

        Args:
            tensors: Gives what takes the place of ``tensors``, in order.
        """
        return _Unpickler(self._state, [next(tensors) for _ in self.tensors]).load()


class _Pickler(pickle.Pickler):
    def __init__(self, state: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(state, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, (nn.Module, nn.Parameter)):
            raise TypeError(f"a {type(value).__name__} in an output is the model's own")
        if not isinstance(value, Tensor):
            return None
        if type(value) is not Tensor or value.layout != torch.strided:
            raise TypeError("a tensor in an output must be dense")
        known = next((i for i, t in enumerate(self._tensors) if t is value), None)
        if known is None:
            known = len(self._tensors)
            self._tensors.append(value)
        return known


class _Unpickler(pickle.Unpickler):
    """Reads what this process has just pickled."""

    def __init__(self, state: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(state))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]
