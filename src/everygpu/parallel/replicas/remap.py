"""Copies of a module's attributes around other modules and tensors, wherever these occur in them.

A module's forward may be patched with a bound method, a partial or a closure over the module itself; a hook may be a
method of another module; an LSTM has a list of its parameters. On a replica these must lead to the replica's.
"""

import enum
import functools
import operator
import re
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

TABLES = ("_parameters", "_buffers", "_modules")
"""The tables of a module's tensors and children."""

CONSTANTS = frozenset(
    {int, float, complex, str, bytes, bool, type(None), type(...), range, re.Pattern, types.ModuleType}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
    | {types.MethodDescriptorType, types.WrapperDescriptorType, RemovableHandle}
)
"""Types of values that never change, or whose contents are no state of a model."""

_COPY = "_everygpu_copy"
"""Attribute of a function that ``Remap`` has made: a reference to itself, as wrappers take others' attributes over."""

MISSING = object()
"""The value of a variable that isn't defined, and the contents of a cell that isn't filled."""


def is_constant(value: Any) -> bool:
    """Whether a value can neither change nor refer to a tensor of the module tree."""
    if type(value) in CONSTANTS or isinstance(value, (type, enum.Enum)):
        return True
    # NumPy's float64 is also a float; a subclass with attributes is an object like any other.
    return isinstance(value, (int, float, complex, str, bytes)) and not hasattr(value, "__dict__")


class Remap:
    """Finds what takes the place of a value.

    Objects of other classes than those that ``open_value`` knows are shared, as in
    nn.DataParallel; so are lists and dicts that functions refer to, which hooks fill and forwards read settings from.

    Args:
        others: By ``id`` of modules and tensors, what takes their places.
        copy: Copies tensors that aren't among these; containers are then also copied, so that replicas don't write
            into each other's. When left out, what leads to none of ``others`` stays as it is.
    """

    def __init__(self, others: Mapping[int, Any], copy: Callable[[Tensor], Tensor] | None = None) -> None:
        self._others = others
        self._copy = copy
        # With the values, or an id would be free for another value.
        self._done: dict[tuple[int, bool], tuple[Any, Any]] = {}

    def of(self, value: Any, *, is_referent: bool = False) -> Any:
        """Return what takes a value's place, itself often: of an attribute's, or of what a function refers to."""
        if is_constant(value):
            return value
        if id(value) in self._others:
            return self._others[id(value)]
        key = id(value), is_referent
        if key not in self._done:
            self._done[key] = value, value  # which a container that contains itself finds
            self._done[key] = value, self._made(value, is_referent)
        return self._done[key][1]

    def _made(self, value: Any, is_referent: bool) -> Any:
        copies = self._copy is not None and not is_referent
        if isinstance(value, Tensor):
            return self._copy(value) if copies and self._copy is not None else value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        opened = open_value(value, is_referent=is_referent)
        if opened is None:
            return value
        parts = [self.of(part, is_referent=is_referent or opened.is_callable) for part in opened.children]
        if all(map(operator.is_, parts, opened.children)) and not (copies and opened.is_mutable):
            return value
        return opened.rebuild(parts)

    def _function(self, function: types.FunctionType) -> Any:
        """Copy a function with a closure cell, default or attribute that is replaced."""
        closure, old = function.__closure__ or (), _referents(function)
        new = [self.of(part, is_referent=True) for part in old]
        if all(map(operator.is_, new, old)):
            return function
        # An unchanged cell is shared: the function may write into it, as a counter does.
        cells = [cell if a is b and a is not function else types.CellType() for cell, a, b in zip(closure, old, new)]
        copied = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
        )
        parts = iter([copied if part is function else part for part in new])
        for cell, before in zip(cells, closure):
            part = next(parts)
            if cell is not before:
                cell.cell_contents = part
        copied.__defaults__ = function.__defaults__ and tuple(next(parts) for _ in function.__defaults__)
        copied.__kwdefaults__ = function.__kwdefaults__ and {k: next(parts) for k in function.__kwdefaults__}
        vars(copied).update({k: next(parts) for k in vars(function)})
        vars(copied)[_COPY] = weakref.ref(copied)
        copied.__doc__, copied.__qualname__ = function.__doc__, function.__qualname__
        copied.__module__, copied.__annotations__ = function.__module__, function.__annotations__
        return copied


def is_copy(function: types.FunctionType) -> bool:
    """Whether a function was made for a replica, or for a capture, of one that the module itself leads to."""
    ref = vars(function).get(_COPY)
    return isinstance(ref, weakref.ref) and ref() is function


@contextmanager
def in_place_of(module: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Make a module and its submodules use other tensors for their parameters, by ``id``, within the block.

    Also where attributes lead to these: an LSTM computes with a list of its parameters, and rebuilds it, with their
    memory moved, when its weak references are to others than the registered ones.
    """
    remap = Remap(others)
    changes = [
        (table, name, value, other)
        for m in module.modules()
        for table in (vars(m), m._parameters)
        for name, value in table.items()
        if name not in TABLES and (other := remap.of(value)) is not value
    ]
    for table, name, _, other in changes:
        table[name] = other
    try:
        yield
    finally:
        for table, name, value, other in changes:
            if table.get(name) is other:
                table[name] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A value and what it refers to."""

    children: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    """Makes a copy that has as many others."""
    is_mutable: bool = False
    is_callable: bool = False


def open_value(value: Any, *, is_referent: bool) -> Opened | None:
    """Open what replicas have copies of: what can be called, and containers of plain classes, but none that can change
    and that a function refers to; None for anything else, also a list or dict of a user's own class.
    """
    opened = open_callable(value) or _open_container(value)
    return None if opened is not None and opened.is_mutable and is_referent else opened


def _open_container(value: Any) -> Opened | None:
    kind = type(value)
    if kind in (list, set, deque):
        rebuild: Callable[[Any], Any] = functools.partial(deque, maxlen=value.maxlen) if kind is deque else kind
        return Opened(children=tuple(value), rebuild=rebuild, is_mutable=True)
    if kind in (dict, OrderedDict, defaultdict):
        return Opened(children=tuple(value.values()), rebuild=functools.partial(_new_dict, value), is_mutable=True)
    if kind in (tuple, frozenset):
        return Opened(children=tuple(value), rebuild=kind)
    if isinstance(value, tuple) and kind.__bases__ == (tuple,) and hasattr(kind, "_make"):
        return Opened(children=tuple(value), rebuild=kind._make)
    return None


def open_callable(value: Any) -> Opened | None:
    """Open a bound method, a partial, a function or a weak reference; None for anything else."""
    kind = type(value)
    if kind is types.FunctionType:
        return Opened(children=tuple(_referents(value)), rebuild=lambda _: value, is_callable=True)
    if kind is types.MethodType:
        children = value.__func__, value.__self__
        return Opened(children=children, rebuild=lambda new: types.MethodType(*new), is_callable=True)
    if kind is functools.partial:
        children = (value.func, *value.args, *value.keywords.values(), *vars(value).values())
        return Opened(children=children, rebuild=functools.partial(_new_partial, value), is_callable=True)
    if kind is weakref.ref:
        return Opened(children=(value(),), rebuild=lambda new: weakref.ref(new[0]), is_callable=True)
    return None


def cell_contents(cell: types.CellType) -> Any:
    """Return what a closure cell has; MISSING if it isn't filled."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _referents(function: types.FunctionType) -> list[Any]:
    return [
        *(cell_contents(cell) for cell in function.__closure__ or ()),
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
        *vars(function).values(),
    ]


def _new_dict(value: dict[Any, Any], new: Sequence[Any]) -> dict[Any, Any]:
    copied = value.copy()
    copied.update(zip(value, new))
    return copied


def _new_partial(value: "functools.partial[Any]", new: Sequence[Any]) -> Any:
    parts = iter(new)
    function, args = next(parts), [next(parts) for _ in value.args]
    copied = functools.partial(function, *args, **{k: next(parts) for k in value.keywords})
    vars(copied).update({k: next(parts) for k in vars(value)})
    return copied
