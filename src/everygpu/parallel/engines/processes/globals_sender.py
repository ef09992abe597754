"""What a helper is told of variables outside the module: their values, when they have changed."""

import functools
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from cloudpickle import list_registry_pickle_by_value
from torch import Tensor, nn

from everygpu.parallel.engines.processes.messages import Packed
from everygpu.parallel.engines.processes.packing import CannotTravelError, Names, pack
from everygpu.parallel.engines.processes.shared_tensors import Exporter
from everygpu.parallel.engines.processes.used_globals import Path, Variable, find_class, origin_of
from everygpu.parallel.engines.processes.watched_globals import WatchedGlobals, is_code, stays_apart
from everygpu.parallel.replicas.callables import MISSING
from everygpu.parallel.replicas.contents import is_constant

Row = tuple[Path, bool, Any]
"""A variable's name, whether it is defined, and its value."""


class GlobalsSender:
    """Finds which variables that the code of a replica reads have changed since the helper was told last.

    Args:
        modules: All of the replica.
        exporter: Describes tensors to the helper.
    """

    def __init__(self, modules: Sequence[nn.Module], exporter: Exporter) -> None:
        self._modules = modules
        self._exporter = exporter
        self._watch: WatchedGlobals | None = None
        self._data: dict[Path, bytes] = {}

    def update(self, names: Callable[[], Names], told: dict[Path, bool]) -> tuple[Packed | None, list[Tensor]]:
        """Say what has changed, and take it as told.

        Args:
            names: Returns what both processes have, by ``id``.
            told: Variables that the helper knows of, by this replica or another, and whether it has been sent them;
                more are added.
        Returns:
            The message; and tensors to be kept until the helper has read it.
        Raises:
            CannotTravelError: a value can't be sent; the message names the variable.
        """
        is_first = self._watch is None
        if self._watch is None:
            self._watch = WatchedGlobals(self._modules, {})
            changed = [v for path, v in self._watch.variables.items() if told.get(path) or not _travels(v)]
            for path in self._watch.variables.keys() - {v.path for v in changed}:
                told.setdefault(path, False)
        else:
            changed = [] if self._watch.is_same() else self._watch.changed()
            changed += [v for v in self._watch.opaque() if self._is_other(v, names())]
        rows = [row for v in changed if (row := self._row(v, told, is_first=is_first)) is not None]
        return self._pack(rows, names()) if rows else (None, [])

    def _row(self, variable: Variable, told: dict[Path, bool], *, is_first: bool) -> Row | None:
        value, path = variable.read(), variable.path
        is_told = told.get(path, False) if is_first else path in told
        told.setdefault(path, False)
        if stays_apart(value) or (not is_told and self._is_alike(variable, value)):
            return None
        if is_told and is_code(value):
            value = _by_value(path, value)
        told[path] = True
        return path, value is not MISSING, None if value is MISSING else value

    def _is_alike(self, variable: Variable, value: Any) -> bool:
        """Tell whether the helper finds the same value by itself: it has imported the same modules."""
        kind = variable.path[0]
        if value is MISSING or isinstance(value, types.ModuleType):
            return True
        if kind == "cell":
            return is_code(value) or isinstance(value, type)
        if kind == "defaults":
            return all(map(is_constant, value.values() if isinstance(value, dict) else value))
        if origin_of(variable.path[1]) == "library" and not (is_code(value) or is_constant(value)):
            return True
        return _is_defined_here(variable.path, value)

    def _is_other(self, variable: Variable, names: Names) -> bool:
        """Tell whether a value that may change unseen is another than the last time."""
        packed, _ = self._pack([(variable.path, True, variable.read())], names)
        before = self._data.get(variable.path)
        self._data[variable.path] = packed.data
        return before != packed.data

    def find_culprit(self, names: Names) -> str | None:
        """Name a variable that can't be sent, where code that travels by value takes it along."""
        used = [(v.path, v.read()) for v in WatchedGlobals(self._modules, {}).variables.values()]
        return self._culprit([(path, True, x) for path, x in used if not is_code(x) and x is not MISSING], names)

    def _pack(self, rows: Sequence[Row], names: Names) -> tuple[Packed, list[Tensor]]:
        try:
            return pack(rows, self._exporter, names)
        except CannotTravelError as error:
            raise CannotTravelError(self._culprit(rows, names) or str(error)) from error

    def _culprit(self, rows: Sequence[Row], names: Names) -> str | None:
        for path, _, value in rows:
            try:
                pack(value, self._exporter, names)
            except CannotTravelError as error:
                name = Variable(path, None, "forward")
                return f"{name} of type {type(value).__name__}, which forward reads, can't be sent ({error})"
        return None


def _travels(variable: Variable) -> bool:
    """Tell whether a variable travels with the code that reads it, as what ``__main__`` defines does."""
    kind, module = variable.path[:2]
    if kind not in ("global", "class"):
        return False
    if module == "__main__" or module not in sys.modules or module in list_registry_pickle_by_value():
        return True
    if kind == "class":
        return find_class(module, variable.path[2]) is not variable.owner
    return variable.owner is not vars(sys.modules[module])


def _is_defined_here(path: Path, value: Any) -> bool:
    """Tell whether a function or class is the one that the source code defines by this name."""
    value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    value = value.func if isinstance(value, functools.cached_property) else value
    value = value.fget if isinstance(value, property) else value
    if not is_code(value) and not isinstance(value, type):
        return False
    if value is None or isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
        return True
    name = ".".join(path[2:])
    if (getattr(value, "__module__", None), getattr(value, "__qualname__", None)) != (path[1], name):
        return False
    function = inspect.unwrap(value) if isinstance(value, types.FunctionType) else value
    if function is value or not isinstance(function, types.FunctionType):
        return True
    # A wrapper has the name of what it wraps, whether it is a decorator's or was put in place later.
    code = function.__code__
    return linecache.getline(code.co_filename, code.co_firstlineno).lstrip().startswith("@")


def _by_value(path: Path, value: Any) -> Any:
    """Return a value that is pickled by value, where its name would lead the helper to what it has had so far."""
    if isinstance(value, type) and path[0] == "global" and (value.__module__, value.__qualname__) == path[1:]:
        raise CannotTravelError(f"class {value.__qualname__} of module {path[1]} was defined anew")
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(_by_value(path, value.__func__))
    if isinstance(value, property):
        return property(*(f and _by_value(path, f) for f in (value.fget, value.fset, value.fdel)))
    if not isinstance(value, types.FunctionType) or origin_of(value.__module__ or "") != "user":
        return value
    copied = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, value.__closure__
    )
    copied.__kwdefaults__, copied.__module__, copied.__qualname__ = (
        value.__kwdefaults__,
        value.__module__,
        value.__qualname__,
    )
    vars(copied).update(vars(value))
    return copied
