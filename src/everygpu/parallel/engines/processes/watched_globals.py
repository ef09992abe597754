"""Which variables outside a module tree have changed, looked for at every call."""

import contextvars
import functools
import logging
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from everygpu.parallel.engines.processes.used_globals import CACHED, Path, UsedGlobals, Variable, origin_of
from everygpu.parallel.replicas.callables import MISSING
from everygpu.parallel.replicas.contents import DeepContents, is_constant

_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    property,
    staticmethod,
    classmethod,
    functools.cached_property,
    CACHED,
)
_OWN = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.local,
    threading.Event,
    threading.Condition,
    contextvars.ContextVar,
    logging.Logger,
)
_NUMBERS = frozenset({int, float, bool, str, type(None)})


class WatchedGlobals:
    """Compares variables with what they were.

    Args:
        modules: All of the tree.
        known: By ``id``, what is compared elsewhere.
    """

    def __init__(self, modules: Sequence[nn.Module], known: Mapping[int, Any]) -> None:
        self._modules = modules
        self._known = {**known, **{id(m): None for m in modules}}
        self._search()

    def is_same(self) -> bool:
        """Tell whether no variable has changed that doesn't change unseen."""
        return (
            all(v.read() is self.values[path] for path, v in self.variables.items())
            and self._has_classes()
            and all(deep.is_same() for deep in self._deep.values())
        )

    def opaque(self) -> list[Variable]:
        """Return variables with values that may change unseen."""
        return [self.variables[path] for path, deep in self._deep.items() if deep.is_opaque]

    def changed(self) -> list[Variable]:
        """Return what has changed since the last call, and record it; a deleted variable's value is MISSING."""
        found = [v for path, v in self.variables.items() if self._has_changed(path, v)]
        before, known = self.values, self.variables
        if any(_may_have_code(x) for v in found for x in (v.read(), before[v.path])) or not self._has_classes():
            self._search()
            found += [v for path, v in self.variables.items() if path not in known and v.read() is not MISSING]
        else:
            self._record({v.path for v in found})
        return found

    def _search(self) -> None:
        self.used = UsedGlobals(self._modules)
        self.variables = self.used.variables
        self._classes = [vars(kind) for kind in self.used.classes.values()]
        self._class_sizes = list(map(len, self._classes))
        self._deep: dict[Path, DeepContents] = {}
        self._record(self.variables)

    def _record(self, paths: Any) -> None:
        self.values = {path: v.read() for path, v in self.variables.items()}
        for path in paths:
            value = self.values[path]
            self._deep.pop(path, None)
            may_hold = not (value is MISSING or is_constant(value) or is_code(value) or stays_apart(value))
            if may_hold and not (path[0] in ("global", "class") and origin_of(path[1]) == "library"):
                self._deep[path] = DeepContents([value], self._known)

    def _has_classes(self) -> bool:
        """Tell whether classes have as many attributes as they had."""
        return list(map(len, self._classes)) == self._class_sizes

    def _has_changed(self, path: Path, variable: Variable) -> bool:
        now, before = variable.read(), self.values[path]
        if now is not before:
            return not (is_constant(now) and type(now) is type(before) and now == before)
        deep = self._deep.get(path)
        return deep is not None and not deep.is_same()


def is_code(value: Any) -> bool:
    """Tell whether a value is code or a name for it, which has no state but what is found as variables."""
    if isinstance(value, nn.Module):
        return False
    if isinstance(value, _CODE) or (callable(value) and type(value).__module__.startswith("torch.")):
        return True
    name, module = getattr(value, "__name__", None), getattr(value, "__module__", None)
    if not (callable(value) and isinstance(name, str) and isinstance(module, str)) or module not in sys.modules:
        return False
    return bool(vars(sys.modules[module]).get(name) is value)


def stays_apart(value: Any) -> bool:
    """Tell whether each process has a value of its own, as of a lock."""
    return isinstance(value, _OWN)


def _may_have_code(value: Any, depth: int = 8) -> bool:
    if isinstance(value, (dict, list, tuple, set, frozenset)) and depth:
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return any(_may_have_code(part, depth - 1) for part in parts if type(part) not in _NUMBERS)
    is_kind = isinstance(value, (type, types.ModuleType))
    return value is not MISSING and (is_kind or not (is_constant(value) or isinstance(value, Tensor)))
