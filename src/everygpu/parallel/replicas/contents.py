"""What a module's plain attributes hold at every depth, recorded so that one comparison finds any change.

A value is recordable when everything that can change in it is compared: items of containers, fields of dataclasses,
and what functions refer to, down to constants, classes, the tree's modules and tensors. Anything else, such as an
object of any other class or a tensor that is no parameter or buffer, may change unseen.
"""

import dataclasses
import enum
import itertools
import operator
import re
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everygpu.parallel.replicas.callables import open_callable

CONTAINERS = (dict, list, tuple, set, frozenset, deque)

_CONSTANTS = frozenset(
    {int, float, complex, str, bytes, bool, type(None), type(...), range, re.Pattern, types.ModuleType}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
    | {types.MethodDescriptorType, types.WrapperDescriptorType, RemovableHandle}
)
"""Types of values that never change, or whose contents are no state of a model."""

_chain = itertools.chain.from_iterable
_values = operator.methodcaller("values")  # of a subclass in its own order, as OrderedDict's


def is_constant(value: Any) -> bool:
    """Tell whether a value can neither change nor refer to a tensor of the module tree."""
    if type(value) in _CONSTANTS or isinstance(value, (type, enum.Enum)):
        return True
    # NumPy's float64 is a float, too; a subclass with attributes is an object like any other.
    return isinstance(value, (int, float, complex, str, bytes)) and not hasattr(value, "__dict__")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Containers and functions, with copies of what was in them."""

    empty: list[Any]
    """Containers that were empty, as most of a module's hooks are."""
    tables: list[dict[Any, Any]]
    table_lengths: list[int]
    keys: list[Any]
    values: list[Any]
    """Of all tables, one after another."""
    sequences: list[Collection[Any]]
    """Lists, sets and deques."""
    sequence_lengths: list[int]
    items: list[Any]
    functions: list[Any]
    referents: list[tuple[Any, ...]]
    """For each function."""

    def is_same(self) -> bool:
        """Tell whether everything holds what it did.

        Compared by identity and in order: equal values of other types, or in another order, are a change.
        """
        return (
            not any(self.empty)
            and list(map(len, self.tables)) == self.table_lengths
            and list(map(len, self.sequences)) == self.sequence_lengths
            and all(map(operator.is_, _chain(self.tables), self.keys))
            and all(map(operator.is_, _chain(map(_values, self.tables)), self.values))
            and all(map(operator.is_, _chain(self.sequences), self.items))
            and all(map(_is_same, map(_referents, self.functions), self.referents))
        )


def is_open(value: Any) -> bool:
    """Tell whether a value is an object that forward may read attributes of, such as a configuration."""
    is_known = isinstance(value, (type, types.ModuleType, types.FunctionType, Tensor, nn.Module, dict, list, set))
    return (
        not is_known and hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch.", "everygpu."))
    )


def identity_of(value: Any) -> Any:
    """Return what tells a value from others: equal numbers and texts are the same."""
    return (type(value), value) if isinstance(value, (int, float, str, bool)) else id(value)


def contents_of(containers: Iterable[Any], functions: Iterable[Any]) -> Contents:
    """Record what is in containers and functions now, one level deep."""
    held = list(containers)
    tables = [c for c in held if isinstance(c, dict) and c]
    sequences = [c for c in held if not isinstance(c, dict) and c]
    functions = list(functions)
    return Contents(
        empty=[c for c in held if not c],
        tables=tables,
        table_lengths=list(map(len, tables)),
        keys=list(_chain(tables)),
        values=list(_chain(map(_values, tables))),
        sequences=sequences,
        sequence_lengths=list(map(len, sequences)),
        items=list(_chain(sequences)),
        functions=functions,
        referents=list(map(_referents, functions)),
    )


def joined(parts: Sequence[Contents]) -> Contents:
    """Put several records one after another."""
    names = [field.name for field in dataclasses.fields(Contents)]
    return Contents(**{name: list(_chain(getattr(part, name) for part in parts)) for name in names})


class Search:
    """Searches attributes for containers and functions whose contents can change, at every depth.

    Args:
        known: By ``id``, modules and tensors that are compared elsewhere: here by identity only.

    Attributes:
        containers: Those found, to be compared; a dataclass's attributes are a dict among them.
        functions: Those found, to be compared.
        unseen: Name of the first attribute with a value that may change unseen; None if there is none.
    """

    def __init__(self, known: Mapping[int, Any]) -> None:
        self._known = known
        self._seen: set[int] = set()
        self.containers: list[Any] = []
        self.functions: list[Any] = []
        self.unseen: str | None = None

    def add(self, name: str, value: Any) -> None:
        """Search an attribute.

        An object in an attribute of its own doesn't count as one that changes unseen, and a function only if it refers
        to tensors: replicas share both.
        """
        is_searched = isinstance(value, (*CONTAINERS, Tensor)) or _refers_to_tensors(value, set())
        if is_searched and not self._search(value) and self.unseen is None:
            self.unseen = name

    def _search(self, value: Any) -> bool:
        """Note what has to be compared, and stop at what can't be; tell whether there was nothing of that kind."""
        if is_constant(value) or id(value) in self._known or id(value) in self._seen:
            return True
        self._seen.add(id(value))
        parts = self._container(value) if isinstance(value, CONTAINERS) else self._object(value)
        # Constants are left out first: a vocabulary has a hundred thousand.
        return parts is not None and all(self._search(part) for part in parts if type(part) not in _CONSTANTS)

    def _container(self, value: Any) -> list[Any]:
        if not isinstance(value, (tuple, frozenset)):
            self.containers.append(value)
        if type(value) is not OrderedDict and hasattr(value, "__dict__"):  # one of the user's classes
            self.containers.append(vars(value))
        return [*value, *value.values()] if isinstance(value, dict) else list(value)

    def _object(self, value: Any) -> Sequence[Any] | None:
        """Return what an object refers to; None where that isn't known."""
        if isinstance(value, types.BuiltinFunctionType):
            return (value.__self__,)
        if isinstance(value, weakref.ref):
            referent = value()
            return () if referent is None or id(referent) in self._known else None
        if dataclasses.is_dataclass(value):
            return self._dataclass(value)
        if open_callable(value) is None:
            return None
        self.functions.append(value)
        return _referents(value)

    def _dataclass(self, value: Any) -> Sequence[Any] | None:
        attributes: dict[str, Any] = getattr(value, "__dict__", {})
        in_slots = {f.name for f in dataclasses.fields(value)} - attributes.keys()
        if in_slots and not value.__dataclass_params__.frozen:
            return None
        self.containers.append(attributes)
        return [*attributes.values(), *(getattr(value, name, None) for name in in_slots)]


def _refers_to_tensors(value: Any, seen: set[int]) -> bool:
    opened = open_callable(value) if id(value) not in seen else None
    if opened is None:
        return False
    seen.add(id(value))
    return any(isinstance(part, Tensor) or _refers_to_tensors(part, seen) for part in opened.children)


def _referents(function: Any) -> tuple[Any, ...]:
    opened = open_callable(function)
    return () if opened is None else opened.children


def _is_same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))
