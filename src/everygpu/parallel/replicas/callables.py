"""What functions, methods and partials refer to, and how to make them refer to something else.

A module's forward may be patched with a bound method, a partial or a closure over the module itself; a hook may
be a method of another module. On a replica these must mean the replica.
"""

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Reference = Callable[[Any], Any]
"""From what a callable refers to, to what its copy should refer to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCallable:
    """A callable and what it refers to."""

    children: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    """Makes another one that refers to as many others."""


def open_callable(value: Any) -> OpenCallable | None:
    """Open a bound method, a partial, a function or a weak reference; None for anything else."""
    opener = _OPENERS.get(type(value))
    return None if opener is None else opener(value)


def rebind_function(function: types.FunctionType, reference: Reference, done: dict[int, Any]) -> Any:
    """Copy a function that refers, by closure, default or attribute, to something that is replaced.

    Args:
        function: Left as it is.
        reference: Called with everything it refers to.
        done: Results by ``id``; a function that refers to itself finds its copy here.
    Returns:
        The copy; the function itself when nothing is replaced.
    """
    done[id(function)] = function
    old = _referents(function)
    new = [reference(part) for part in old]
    if all(a is b for a, b in zip(old, new)):
        return function
    closure = function.__closure__ or ()
    # A cell that stays the same is shared: its function may count in it.
    cells = [cell if a is b and a is not function else types.CellType() for cell, a, b in zip(closure, old, new)]
    twin = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    done[id(function)] = twin
    _fill(twin, function, [twin if part is function else part for part in new])
    return twin


def _referents(function: types.FunctionType) -> list[Any]:
    return [
        *(_contents(cell) for cell in function.__closure__ or ()),
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
        *vars(function).values(),
    ]


def _fill(twin: types.FunctionType, function: types.FunctionType, new: Sequence[Any]) -> None:
    parts = iter(new)
    for cell, old in zip(twin.__closure__ or (), function.__closure__ or ()):
        part = next(parts)
        if cell is not old:
            cell.cell_contents = part
    twin.__defaults__ = function.__defaults__ and tuple(next(parts) for _ in function.__defaults__)
    twin.__kwdefaults__ = function.__kwdefaults__ and {k: next(parts) for k in function.__kwdefaults__}
    vars(twin).update({k: next(parts) for k in vars(function)})
    twin.__doc__, twin.__qualname__ = function.__doc__, function.__qualname__
    twin.__module__, twin.__annotations__ = function.__module__, function.__annotations__


_EMPTY = object()
"""Stands for a cell that is not filled yet."""


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _open_function(value: types.FunctionType) -> OpenCallable:
    return OpenCallable(children=tuple(_referents(value)), rebuild=lambda _: value)


def _open_method(value: types.MethodType) -> OpenCallable:
    return OpenCallable(children=(value.__func__, value.__self__), rebuild=lambda new: types.MethodType(new[0], new[1]))


def _open_partial(value: functools.partial[Any]) -> OpenCallable:
    num_args, names, attributes = len(value.args), tuple(value.keywords), tuple(vars(value))

    def rebuild(new: Sequence[Any]) -> Any:
        function, rest = new[0], list(new[1:])
        keywords = dict(zip(names, rest[num_args:]))
        twin = functools.partial(function, *rest[:num_args], **keywords)
        vars(twin).update(zip(attributes, rest[num_args + len(names) :]))
        return twin

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
