"""Rules of a tensor class: torch's operations by name, and the table from each to its rule."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Any, Args, Kwargs], Any]
"""From an operation and its arguments to the result, or NotImplemented to run on the joined tensor instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Implementations of functions, above autograd, and of operations, below it."""

    function_for: Callable[[Any], Rule]
    """From a torch function to the one that is called in its place."""
    rules: Mapping[Any, Rule]
    """Operations that run on the parts."""
    run_joined: Rule
    """Runs all other operations, and those whose rule returns NotImplemented."""


def rules_for(*families: tuple[Rule, str]) -> dict[Any, Rule]:
    """Build a table from each named operation to its rule."""
    return {operation: rule for rule, names in families for operation in operations(names)}


def operations(names: str) -> Iterator[Any]:
    """Yield torch's operations by name, ``add`` or ``add.Tensor``, as far as this torch has them."""
    for name in names.split():
        packet, _, overload = name.partition(".")
        found = getattr(torch.ops.aten, packet, None)
        for each_overload in [overload] if overload else [] if found is None else found.overloads():
            operation = getattr(found, each_overload, None)
            if operation is not None and "name" not in each_overload and _works_on_tensors(operation):
                yield operation


def _works_on_tensors(operation: Any) -> bool:
    """Tell overloads for tensors, which write nothing or, if named so, their first argument, from all others."""
    arguments = operation._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    writes = operation.overloadpacket.__name__.endswith("_")
    return any("Tensor" in str(a.type) for a in arguments) and written == ([0] if writes else [])


@functools.cache
def argument_names(func: Any) -> tuple[str, ...]:
    return tuple(a.name for a in func._schema.arguments)


def named(func: Any, args: Args, kwargs: Kwargs) -> Kwargs:
    """Return an operation's arguments by name."""
    return {**dict(zip(argument_names(func), args)), **kwargs}
