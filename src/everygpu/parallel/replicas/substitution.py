"""Other tensors in place of a module's parameters, for a while."""

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from everygpu import tree
from everygpu.parallel.replicas.callables import open_callable, rebind_function
from everygpu.parallel.replicas.contents import is_constant
from everygpu.parallel.replicas.watch import TABLES


@contextmanager
def in_place_of(module: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Have a module and those below it use other tensors for their parameters, by these' ``id``.

    Also where attributes lead to these: an LSTM computes with a list of its parameters, and makes it anew, with their
    memory moved, when its weak references are to others than the registered ones.
    """
    substitution = _Substitution(others)
    changes = [
        (table, name, value, other)
        for m in module.modules()
        for table in (vars(m), m._parameters)
        for name, value in table.items()
        if name not in TABLES and (other := substitution.of(value)) is not value
    ]
    for table, name, _, other in changes:
        table[name] = other
    try:
        yield
    finally:
        for table, name, value, other in changes:
            if table.get(name) is other:
                table[name] = value


class _Substitution:
    """Finds what stands in place of a value that leads to some tensors.

    Args:
        others: By ``id`` of the tensors that are replaced.
    """

    def __init__(self, others: Mapping[int, Tensor]) -> None:
        self._others = others
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []  # an id is free for another value once its own is gone

    def of(self, value: Any) -> Any:
        """Return a copy around other tensors; the value itself where it leads to none of those that are replaced."""
        if isinstance(value, Tensor):
            return self._others.get(id(value), value)
        if is_constant(value):
            return value
        if id(value) in self._done:
            return self._done[id(value)]
        self._kept.append(value)
        if isinstance(value, FunctionType):
            return rebind_function(value, self.of, self._done)
        self._done[id(value)] = value  # which a container that contains itself finds
        if isinstance(value, (set, frozenset)):
            self._done[id(value)] = self._set(value)
            return self._done[id(value)]
        opened = tree.open_container(value) if isinstance(value, (dict, list, tuple)) else open_callable(value)
        parts = [] if opened is None else [self.of(part) for part in opened.children]
        if opened is not None and not all(map(operator.is_, parts, opened.children)):
            self._done[id(value)] = opened.rebuild(parts)
        return self._done[id(value)]

    def _set(self, value: set[Any] | frozenset[Any]) -> Any:
        parts = [self.of(part) for part in value]
        return value if all(map(operator.is_, parts, value)) else type(value)(parts)
