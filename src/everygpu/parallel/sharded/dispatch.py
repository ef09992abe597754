"""Torch's operations by name, the table of rules, and arguments by name."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Any, Args, Kwargs], Any]
"""From an operation and its arguments to the result; it raises ``Declined`` to run on the joined tensor instead."""


class Declined(Exception):  # noqa: N818 - no error
    """An operation has to run on the joined tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Implementations of functions, above autograd, and of operations, below it."""

    function_for: Callable[[Any], Rule]
    """From a torch function to the one that is called in its place."""
    rules: Mapping[Any, Rule | None]
    """Operations that run on the parts; None for all others."""
    run_joined: Rule
    """Runs operations without a rule, and those whose rule declines."""


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
    """Whether an overload is for tensors, and writes nothing or, if named so, only its first argument."""
    written = [place for place, _ in written_arguments(operation)]
    writes = operation.overloadpacket.__name__.endswith("_")
    return any("Tensor" in str(a.type) for a in operation._schema.arguments) and written == ([0] if writes else [])


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the places and names of the arguments that an operation writes to."""
    arguments = enumerate(func._schema.arguments) if hasattr(func, "_schema") else ()
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
def _defaults(func: Any) -> Kwargs:
    return {a.name: a.default_value for a in func._schema.arguments}


def named(func: Any, args: Args, kwargs: Kwargs) -> Kwargs:
    """Return an operation's arguments by name, defaults too."""
    defaults = _defaults(func)
    return {**defaults, **dict(zip(defaults, args)), **kwargs}
