"""Python values on their way to another process: pickled by value, the tensors in them shared."""

import functools
import io
import pickle
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrize

from everygpu.parallel.engines.processes.messages import Packed
from everygpu.parallel.engines.processes.shared_tensors import Exporter, SharedTensor

Names = Mapping[int, tuple[str, int]]
"""From ``id`` of an object that both processes have to its name: ("module", 3)."""


_LEAF = "torch::autograd::AccumulateGrad"
_COPIES = frozenset({"ToCopyBackward0", "ViewBackward0", "torch::autograd::CopyBackwards"})
"""Autograd's nodes behind what ``comm.copy`` returns."""


class CannotTravelError(Exception):
    """A value can't be sent to another process; the message says why."""


def pack(
    value: Any,
    exporter: Exporter,
    names: Names,
    *,
    lends: bool = False,
    prepare: Callable[[Tensor], Tensor] | None = None,
    params: Collection[int] | None = None,
) -> tuple[Packed, list[Tensor]]:
    """Make a message of a value.

    Args:
        value: Any.
        exporter: Describes its tensors.
        names: Objects that are sent by name.
        lends: Keep the tensors until they are given back.
        prepare: Makes of each tensor the one that is shared.
        params: The ``id`` of each parameter of the module: what forward has kept was computed from these. A tensor that
            was computed from others is refused; None to look at no graph.
    Returns:
        The message; and the tensors that it tells of, to be kept until the other process has read them.
    Raises:
        CannotTravelError: something in the value can't be pickled, or a tensor can't be shared.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, exporter, names, prepare, params)
    try:
        pickler.dump(value)
    except CannotTravelError:
        raise
    except Exception as error:
        raise CannotTravelError(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
    shared = [exporter.describe(t, lends=lends) for t in pickler.tensors]
    return Packed(data=file.getvalue(), tensors=shared), pickler.tensors


def unpack(packed: Packed, tensors: Sequence[Tensor], find: Callable[[str, int], Any]) -> Any:
    """Make the value of a message.

    Args:
        packed: The message.
        tensors: One for each that it tells of.
        find: Returns what has a name.
    Raises:
        CannotTravelError: something in the value can't be made here, such as an object of a class whose module only the
            other process has: PyG writes modules as it makes its layers.
    """
    try:
        return _Unpickler(io.BytesIO(packed.data), tensors, find).load()
    except CannotTravelError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise CannotTravelError(f"a value can't be made in the other process ({reason})") from error


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self,
        file: io.BytesIO,
        exporter: Exporter,
        names: Names,
        prepare: Callable[[Tensor], Tensor] | None,
        params: Collection[int] | None,
    ) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._exporter = exporter
        self._names = names
        self._prepare = prepare
        self._params = params
        # With the tensor itself, as an id is used again once its object is gone.
        self._seen: dict[int, tuple[int, Tensor]] = {}

    def persistent_id(self, value: Any) -> Any:
        is_tensor = isinstance(value, Tensor)
        if not is_tensor and not isinstance(value, nn.Module):
            return None
        name = self._names.get(id(value))
        if name is not None or not is_tensor:
            return name
        return self._shared(value)

    def reducer_override(self, value: Any) -> Any:
        if type(value) is weakref.ref and value() is not None:  # as a recurrent layer has of its weights
            return weakref.ref, (value(),)
        if isinstance(value, type) and value.__module__ == parametrize.__name__ and "__getstate__" in vars(value):
            names = tuple(k for k, v in vars(value).items() if isinstance(v, property))
            return _parametrized, (value.__base__, names)
        return super().reducer_override(value)

    def _loses_gradient(self, value: Tensor) -> bool:
        return _is_of_leaf(value) or (self._params is not None and _is_of_others(value, self._params))

    def _shared(self, value: Tensor) -> tuple[str, int] | None:
        if id(value) not in self._seen:
            if self._prepare is None and value.requires_grad and self._loses_gradient(value):
                raise CannotTravelError(
                    f"a tensor of shape {tuple(value.shape)} requires a gradient, which the other process would keep: "
                    f"register it in the module as an nn.Parameter, or as a part of an nn.Module; what is computed "
                    f"anew for each forward can be an input"
                )
            prepared = value if self._prepare is None else self._prepare(value)
            reason = self._exporter.why_not_shared(prepared)
            if reason is not None:
                if not prepared.is_cpu:
                    raise CannotTravelError(reason)
                return None  # pickled by value
            self._seen[id(value)] = (len(self.tensors), value)
            self.tensors.append(prepared)
        return "tensor", self._seen[id(value)][0]


def _is_of_others(t: Tensor, params: Collection[int]) -> bool:
    """Tell whether a tensor was computed from leaves that are no parameters of the module."""
    left, seen = [get_gradient_edge(t).node], set()
    while left:
        node: Any = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == _LEAF and id(node.variable) not in params:
            return True
        left += [before for before, _ in node.next_functions if before is not None]
    return False


def _is_of_leaf(t: Tensor) -> bool:
    """Tell whether a tensor is a leaf of autograd, or a copy of one, as replicas on other devices have."""
    node: Any = get_gradient_edge(t).node
    while node.name() in _COPIES:
        node = next(before for before, _ in node.next_functions if before is not None)
    return bool(node.name() == _LEAF)


@functools.cache
def _parametrized(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Make the class that torch gives to a module with parametrizations: torch's own refers to the module."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(())))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
    return type(module)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor], find: Callable[[str, int], Any]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._find = find

    def persistent_load(self, name: Any) -> Any:
        kind, index = name
        return self._tensors[index] if kind == "tensor" else self._find(kind, index)


def describe_all(tensors: Sequence[Tensor | None], exporter: Exporter, *, lends: bool) -> list[SharedTensor | None]:
    """Describe tensors, where there are any."""
    return [None if t is None else exporter.describe(t, lends=lends) for t in tensors]
