"""Referents of functions, methods and partials, and copies with other referents.

A module's forward may be patched with a bound method, a partial or a closure over the module itself; a hook may
be a method of another module. On a replica these must refer to the replica.
"""

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Reference = Callable[[Any], Any]
"""From a referent of a callable to that of its copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCallable:
    """A callable and its referents."""

    children: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    """Makes a copy that has as many other referents."""


def open_callable(value: Any) -> OpenCallable | None:
    """Open a bound method, a partial, a function or a weak reference; None for anything else."""
    opener = _OPENERS.get(type(value))
    return None if opener is None else opener(value)


def rebind_function(function: types.FunctionType, reference: Reference, copies: dict[int, Any]) -> Any:
    """Copy a function with a closure cell, default or attribute that is replaced.

    Args:
        function: Not changed.
        reference: Called with each referent.
        copies: Results by ``id``; a function that refers to itself finds its copy here.
    Returns:
        The copy; the function itself when nothing is replaced.
    """
    copies[id(function)] = function
    old = _referents(function)
    new = [reference(part) for part in old]
    if all(a is b for a, b in zip(old, new)):
        return function
    closure = function.__closure__ or ()
    # An unchanged cell is shared: the function may write into it, as a counter does.
    cells = [cell if a is b and a is not function else types.CellType() for cell, a, b in zip(closure, old, new)]
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    copies[id(function)] = copied
    _fill(copied, function, [copied if part is function else part for part in new])
    return copied


def _referents(function: types.FunctionType) -> list[Any]:
    return [
        *(cell_contents(cell) for cell in function.__closure__ or ()),
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
        *vars(function).values(),
    ]


def _fill(copied: types.FunctionType, function: types.FunctionType, new: Sequence[Any]) -> None:
    parts = iter(new)
    for cell, old in zip(copied.__closure__ or (), function.__closure__ or ()):
        part = next(parts)
        if cell is not old:
            cell.cell_contents = part
    copied.__defaults__ = function.__defaults__ and tuple(next(parts) for _ in function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__ and {k: next(parts) for k in function.__kwdefaults__}
    vars(copied).update({k: next(parts) for k in vars(function)})
    copied.__doc__, copied.__qualname__ = function.__doc__, function.__qualname__
    copied.__module__, copied.__annotations__ = function.__module__, function.__annotations__


MISSING = object()
"""The value of a variable that isn't defined, and the contents of a cell that isn't filled."""


def cell_contents(cell: types.CellType) -> Any:
    """Return what a closure cell has; MISSING if it isn't filled."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _open_function(value: types.FunctionType) -> OpenCallable:
    return OpenCallable(children=tuple(_referents(value)), rebuild=lambda _: value)


def _open_method(value: types.MethodType) -> OpenCallable:
    return OpenCallable(children=(value.__func__, value.__self__), rebuild=lambda new: types.MethodType(new[0], new[1]))


def _open_partial(value: functools.partial[Any]) -> OpenCallable:
    num_args, names, attributes = len(value.args), tuple(value.keywords), tuple(vars(value))

    def rebuild(new: Sequence[Any]) -> Any:
        function, rest = new[0], list(new[1:])
        keywords = dict(zip(names, rest[num_args:]))
        copied = functools.partial(function, *rest[:num_args], **keywords)
        vars(copied).update(zip(attributes, rest[num_args + len(names) :]))
        return copied

    children = (value.func, *value.args, *value.keywords.values(), *vars(value).values())
    return OpenCallable(children=children, rebuild=rebuild)


def _open_weakref(value: "weakref.ref[Any]") -> OpenCallable:
    return OpenCallable(children=(value(),), rebuild=lambda new: weakref.ref(new[0]))


_OPENERS: dict[type, Callable[[Any], OpenCallable]] = {
    types.FunctionType: _open_function,
    types.MethodType: _open_method,
    functools.partial: _open_partial,
    weakref.ref: _open_weakref,
}
