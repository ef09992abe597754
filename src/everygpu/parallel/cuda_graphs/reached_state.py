"""All Python state that a step can read, held, so that one comparison a step shows any change of it.

Reached are the attributes, elements, closures and defaults of all objects below the roots, at every depth; and what the
code that has run names: globals, attributes of Python's modules and of classes. Values are compared by identity; plain
ones that are other objects, by their bits.
"""

import copyreg
import functools
import itertools
import operator
import os
import random
import re
import struct
import sys
import types
import weakref
from _thread import LockType
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from logging import Logger
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everygpu.parallel.cuda_graphs.executed_code import ExecutedCode, is_left_out
from everygpu.parallel.replicas.module_tree import is_dense
from everygpu.parallel.replicas.remap import MISSING, cell_contents
from everygpu.torch_private.compiler import value_in_context

MAX_VALUES = 200_000
"""Attributes, elements and other places whose values are compared."""
MAX_BYTES = 1 << 20
"""Of arrays, and of tensors on the host, which are compared by value."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size)
_IMMUTABLE = frozenset(
    {*PLAIN, range, Decimal, date, time, datetime, timedelta, timezone, re.Pattern, torch.layout, torch.memory_format}
    | {type(NotImplemented), types.GenericAlias, types.UnionType, types.CodeType, object}
)
_CONTAINERS = (OrderedDict, dict, list, set, frozenset, deque, tuple)
_BASES = (defaultdict, *_CONTAINERS, int, float, complex, str, bytes, BaseException, object)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
"""Whose draws ``HostGenerators`` looks for."""
_NO_STATE = (Logger, np.generic, np.dtype)
"""What never changes, or has no say in a step's values."""
_CODE = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_DESCRIPTORS = (*_CODE, types.MemberDescriptorType, types.GetSetDescriptorType)
"""Attributes of classes that aren't data; functions are known where they run."""
_IS_HEAP_TYPE, _IS_IMMUTABLE_TYPE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE and …_IMMUTABLETYPE in CPython's object.h

_chain = itertools.chain.from_iterable


def bits_of(value: Any) -> Any:
    """Return what is equal for two plain values of one type if these are the same: 0.0 is not -0.0, nan is nan."""
    if type(value) is float:
        return struct.pack("d", value)
    return struct.pack("dd", value.real, value.imag) if type(value) is complex else value


def fill_lazily(kind: type) -> None:
    """Create now what Python adds to a class at first use, as by a copy or a trace, so that it is no change later."""
    with suppress(Exception):
        copyreg._slotnames(kind)  # type: ignore[attr-defined]
    with suppress(Exception):
        _ = kind.__annotations__


class ReachedState:
    """What is reached from ``roots`` by the code that steps have run, as it is now, except tensors in ``known``."""

    def __init__(self, roots: Sequence[Any], known: Iterable[Any], code: ExecutedCode) -> None:
        self.unseen: str | None = None
        """Names an object whose state can't be seen, such as a generator's, so that a change of it can't, either."""
        self.modules: list[nn.Module] = []
        self.generators: list[Any] = []
        """Of random numbers."""
        self._code = code
        self._known = {id(x): x for x in known}
        self._seen: dict[int, Any] = {}
        self._left: list[tuple[str, Any]] = []
        self._refs: list[tuple[str, weakref.ref[Any]]] = []
        self._num_values = self._num_bytes = 0
        # Live views of all that has contents: to read them is what a step costs.
        self._views: list[Any] = []
        self._places: list[str] = []
        self._empty: list[Any] = []  # as most of a module's hooks are
        self._owners: list[Any] = []
        self._functions: list[Any] = []
        self._cells: list[Any] = []
        self._facts: list[Callable[[], Any]] = []
        self._walk(roots)
        self._check_refs()
        self.unseen = self.unseen or code.find_lost(self._functions)
        self._seen = {}
        self._lengths, self._kept = list(map(len, self._views)), self._read_facts()
        self._num_read = sum(self._lengths) + 2 * len(self._owners) + len(self._cells) + 3 * len(self._functions)
        self._hold(self._read())

    def is_same(self) -> bool:
        """Whether everything is as it was."""
        try:
            if any(self._empty) or list(map(len, self._views)) != self._lengths:
                return False
            now = self._read()
        except (RuntimeError, ValueError):  # another thread writes to a container
            return False
        if now.tobytes() != self._addresses:
            if not all(map(_is_same_value, now, self._held)):
                return False
            self._hold(now)
        return self._read_facts() == self._kept

    def find_change(self) -> str | None:
        """Name what isn't as it was."""
        held = iter(self._held)
        for place, view, length in zip(self._places, self._views, self._lengths):
            before, now = list(itertools.islice(held, length)), list(view)
            if len(now) != length or not all(map(_is_same_value, now, before)):
                changed = [name for name, a, b in zip(_names_in(view), now, before) if not _is_same_value(a, b)]
                return _plain(f"{place}.{changed[0]}" if changed else place)
        filled = next((x for x in self._empty if x), None)
        if filled is not None:
            return f"what was an empty {type(filled).__name__} and has {len(filled)} elements"
        return None if self.is_same() else "a closure, a class, or a value in an array"

    def _hold(self, values: "np.ndarray[Any, Any]") -> None:
        self._held, self._addresses = values, values.tobytes()

    def _read(self) -> "np.ndarray[Any, Any]":
        """Read all values into an array, whose bytes are their addresses: these are compared at once."""
        owners = self._owners
        values = itertools.chain(
            _chain(self._views), map(type, owners), map(_attributes, owners), map(cell_contents, self._cells),
            _chain(map(_read_function, self._functions)),
        )  # fmt: skip
        return np.fromiter(values, object, self._num_read)

    def _read_facts(self) -> list[Any]:
        return [read() for read in self._facts]

    # The walk.

    def _walk(self, roots: Sequence[Any]) -> None:
        self._left += [(getattr(x, "__qualname__", type(x).__qualname__), x) for x in roots]
        self._left += [(f.__qualname__, f) for f in self._code.functions]
        for scope, names in self._code.globals:
            self._watch_names(scope.get("__name__", "globals"), scope, names & scope.keys(), names)
            if {"environ", "getenv"} & names or {"environ", "getenv"} & self._code.names:
                self._left.append(("os.environ", os.environ))
        self._left += [(name, sys.modules[name]) for name in self._code.imports if name in sys.modules]
        while self._left:
            place, value = self._left.pop()
            if type(value) in _IMMUTABLE or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if self._num_values > MAX_VALUES:
                self._cannot_see(place, f"leads to more than {MAX_VALUES:,} values")
                return
            self._open(place, value)

    def _open(self, place: str, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, Tensor):
            self._open_tensor(place, value)
        elif issubclass(kind, type):
            self._open_class(value)
        elif issubclass(kind, types.ModuleType):
            self._open_namespace(value)
        elif kind is types.FunctionType:
            self._open_function(place, value)
        elif kind is types.MethodType:
            self._left += [(place, value.__func__), (place, value.__self__)]
        elif issubclass(kind, functools.partial):
            self._watch(place, _View(lambda: (value.func, value.keywords, *value.args)))
            self._left += [(place, part) for part in (value.func, *value.args, value.keywords, vars(value))]
        elif issubclass(kind, weakref.ref):
            self._refs.append((place, value))
        elif kind is ContextVar:
            self._watch(f"context variable {value.name}", _View(lambda: (value_in_context(value),)))
            self._left.append((value.name, value_in_context(value)))
        elif issubclass(kind, np.ndarray):
            self._open_array(place, value)
        elif kind is slice:
            self._left += [(place, x) for x in (value.start, value.stop, value.step)]
        elif kind is LockType:
            self._facts.append(value.locked)
        elif issubclass(kind, _GENERATORS):
            self.generators.append(value)
        elif issubclass(kind, (types.MappingProxyType, *_CONTAINERS)):
            self._open_container(place, value)
        elif hasattr(kind, "cache_info"):  # functools.lru_cache
            self._facts.append(lambda: value.cache_info()[1:])
            self._left += [(place, vars(value))]
        elif not issubclass(kind, _NO_STATE):
            self._open_object(place, value)

    def _open_tensor(self, place: str, value: Tensor) -> None:
        if id(value) in self._known:
            return
        if type(value) not in (Tensor, nn.Parameter) or not is_dense(value):
            self._cannot_see(place, "is no plain dense tensor")
            return
        self._facts.append(functools.partial(_layout_of, value))
        if value.device.type == "cpu" and self._may_compare(
            place, value.nbytes
        ):  # such values are in kernels' arguments
            self._facts.append(functools.partial(_bits_of_tensor, value))

    def _open_array(self, place: str, value: Any) -> None:
        if value.dtype.hasobject:
            self._watch(place, _View(lambda: value.flat))
            self._facts.append(lambda: value.shape)
            self._left += [(place, x) for x in value.flat]
        elif self._may_compare(place, value.nbytes):
            self._facts.append(lambda: (value.dtype.str, value.shape, value.strides, value.tobytes()))

    def _may_compare(self, place: str, num_bytes: int) -> bool:
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_BYTES:
            self._cannot_see(place, f"is too large to be compared in each step: {num_bytes:,} bytes")
        return self._num_bytes <= MAX_BYTES

    def _open_function(self, place: str, value: types.FunctionType) -> None:
        self._left.append((place, vars(value)))
        if not self._code.has(value):
            return
        self._functions.append(value)
        self._cells += value.__closure__ or ()
        parts = zip(value.__code__.co_freevars, map(cell_contents, value.__closure__ or ()))
        self._left += [(f"{place}.{name}", part) for name, part in parts]
        self._left += [(place, x) for x in (value.__defaults__, value.__kwdefaults__)]

    def _open_class(self, value: type) -> None:
        if not value.__flags__ & _IS_HEAP_TYPE or value.__flags__ & _IS_IMMUTABLE_TYPE:
            return
        attributes: Any = vars(value)
        named = sorted((self._code.names | {"forward"}) & attributes.keys())
        if _is_library(value.__module__):  # Dynamo changes Module.__init__ when it compiles for the first time
            self._watch(value.__qualname__, _named(attributes, named))
        else:
            fill_lazily(value)
            self._watch(value.__qualname__, attributes.values(), attributes.keys())
            data = [name for name in named if not isinstance(attributes[name], _DESCRIPTORS)]
            self._left += [(f"{value.__qualname__}.{name}", attributes[name]) for name in data]
            self._left.append((value.__qualname__, type(value)))
        self._left += [(value.__qualname__, base) for base in value.__bases__]
        functions = (f for v in attributes.values() if isinstance(v, _CODE) for f in _functions_in(v))
        self._left += [(value.__qualname__, f) for f in functions if self._code.has(f)]

    def _open_namespace(self, value: types.ModuleType) -> None:
        attributes = vars(value)
        named = self._code.names & attributes.keys()
        self._watch_names(value.__name__, attributes, () if _is_library(value.__name__) else named, named)
        if not _is_library(value.__name__):
            self._facts.append(lambda: len(attributes))  # there may be others that are asked for

    def _watch_names(self, place: str, scope: dict[str, Any], inside: Iterable[str], names: Iterable[str]) -> None:
        self._watch(place, _named(scope, sorted(names)))
        self._left += [(f"{place}.{name}", scope[name]) for name in inside]

    def _open_container(self, place: str, value: Any) -> None:
        kind: Any = next(b for b in (types.MappingProxyType, *_CONTAINERS) if issubclass(type(value), b))
        if kind is tuple or kind is frozenset:
            self._left += [(place, x) for x in kind.__iter__(value)]
        elif type(value) is kind and not value:
            self._empty.append(value)
        elif kind in (OrderedDict, dict, types.MappingProxyType):
            self._watch(place, kind.values(value), kind.keys(value))
            self._left += [(f"{place}[{k!r}]" if type(k) in PLAIN else place, v) for k, v in kind.items(value)]
            self._left += [(place, k) for k in kind.keys(value) if type(k) not in PLAIN]
            if hasattr(value, "default_factory"):
                self._left.append((place, value.default_factory))
        else:
            self._watch(place, value if type(value) is kind else _View(lambda: kind.__iter__(value)))
            self._left += [(place, x) for x in kind.__iter__(value)]
        if type(value) not in (*_CONTAINERS, types.MappingProxyType):
            self._open_object(place, value)

    def _open_object(self, place: str, value: Any) -> None:
        kind: Any = type(value)
        home = kind.__module__.partition(".")[0]
        if hasattr(kind, "wraps_a_module") or (home == "everygpu" and not issubclass(kind, nn.Module)):
            self._left.append((place, getattr(value, "module", None)))
            return
        if _hides_state(kind):
            if home not in ("torch", "typing") and not callable(value):
                self._cannot_see(place, f"is a {kind.__qualname__}, whose state can't be seen")
            elif hasattr(value, "__self__"):
                self._left.append((place, value.__self__))
            return
        if issubclass(kind, nn.Module):
            self.modules.append(value)
        self._left.append((kind.__qualname__, kind))
        attributes = _attributes(value)
        self._owners.append(value)
        if attributes is not None:
            self._watch(place, attributes.values(), attributes.keys())
            self._left += [(f"{place}.{name}", v) for name, v in attributes.items()]
        slots = _slots_of(kind)
        if slots:
            view = _View(lambda: (_in_slot(value, slot) for slot in slots), [slot.__name__ for slot in slots])
            self._watch(place, view)
            self._left += [(f"{place}.{slot.__name__}", v) for slot, v in zip(slots, view)]

    def _watch(self, place: str, *views: Any) -> None:
        self._views += views
        self._places += [place] * len(views)
        self._num_values += sum(map(len, views))

    def _cannot_see(self, place: str, why: str) -> None:
        self.unseen = self.unseen or f"{_plain(place)} {why}"

    def _check_refs(self) -> None:
        """Compare whether weak references are dead; they refer to nothing else ever, and what they keep is held."""
        for place, ref in self._refs:
            value = ref()
            if value is not None and id(value) not in self._seen and id(value) not in self._known:
                self._cannot_see(place, "is a weak reference to an object that may be gone at the next step")
            self._facts.append(functools.partial(lambda ref: ref() is None, ref))


class _View:
    """Values that are read anew each time, which have ``names``, if any; ``MISSING`` for those that aren't there."""

    def __init__(self, read: Callable[[], Iterable[Any]], names: Sequence[Any] = ()) -> None:
        self._read, self.names = read, names

    def __len__(self) -> int:
        return len(self.names) or sum(1 for _ in self._read())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())


def _named(scope: Mapping[str, Any], names: Sequence[str]) -> _View:
    return _View(lambda: map(scope.get, names, itertools.repeat(MISSING)), names)


def _in_slot(value: Any, slot: "types.MemberDescriptorType") -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return MISSING


_read_function = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


def _attributes(value: Any) -> Any:
    return getattr(value, "__dict__", None)


def _is_same_value(a: Any, b: Any) -> bool:
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is tuple:
        return len(a) == len(b) and all(map(_is_same_value, a, b))
    return kind in PLAIN and bool(bits_of(a) == bits_of(b))


def _layout_of(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad


def _bits_of_tensor(t: Tensor) -> bytes:
    flat = t.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


@functools.cache
def _slots_of(kind: type) -> "tuple[types.MemberDescriptorType, ...]":
    found = [v for base in kind.__mro__ if base.__flags__ & _IS_HEAP_TYPE for v in vars(base).values()]
    return tuple(v for v in found if isinstance(v, types.MemberDescriptorType))


@functools.cache
def _hides_state(kind: type) -> bool:
    """Whether objects have memory besides attributes and elements, as those of most classes written in C do."""
    base = next(base for base in _BASES if issubclass(kind, base))
    num_references = len(_slots_of(kind)) + sum(
        getattr(kind, name) > 0 and getattr(base, name) <= 0 for name in ("__dictoffset__", "__weakrefoffset__")
    )
    # A number or a tuple has its elements before the reference to its attributes.
    num_references += bool(base.__itemsize__ and kind.__dictoffset__ < 0)
    return bool(kind.__basicsize__ - base.__basicsize__ > num_references * struct.calcsize("P"))


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of a class's attribute, such as a property's."""
    parts = (getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel", "func"))
    yield from (f for f in (value, *parts) if type(f) is types.FunctionType)


@functools.cache
def _is_library(name: str) -> bool:
    """Whether a Python module is torch's, Python's own, or of this package."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return name.partition(".")[0] in sys.stdlib_module_names if file is None else is_left_out(file)


def _names_in(view: Any) -> list[Any]:
    mapping = getattr(view, "mapping", None)
    return list(getattr(view, "names", () if mapping is None else mapping))


def _plain(place: str) -> str:
    """Write a place as a person would: ``model.layer.scale``."""
    return re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", place)
