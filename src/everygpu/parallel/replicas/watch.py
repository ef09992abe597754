"""Which modules' plain attributes have changed between steps."""

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from everygpu.parallel.replicas.contents import CONTAINERS, Contents, Search, contents_of, joined

TABLES = ("_parameters", "_buffers", "_modules")
"""The tables of a module's tensors and children, which ``Watch`` leaves to others."""

STATE_DICT_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""No forward reads these; torch's weight_norm has such a hook, and so have many libraries' layers."""

_chain = itertools.chain.from_iterable


class Watch:
    """Finds the modules whose plain attributes have changed since the last call.

    Args:
        modules: All of a tree.
        known: Other modules and tensors that the caller compares itself. In attributes these are compared by identity;
            a module with any other tensor in its attributes counts as changed at every call.
    """

    def __init__(self, modules: Sequence[nn.Module], known: Iterable[nn.Module | Tensor] = ()) -> None:
        self._modules = modules
        self._known: dict[int, nn.Module | Tensor] = {id(x): x for x in (*modules, *known)}
        self._records: list[_Record | None] = [None] * len(modules)
        self._summary: _Summary | None = None

    def changed(self) -> list[int]:
        """Return the indices of the modules that have changed since the last call, and record their state."""
        if self._summary is not None and self._summary.is_current(self._modules):
            found = self._summary.volatile
        else:
            found = [i for i, m in enumerate(self._modules) if not _is_current(self._records[i], m)]
        self.accept(found)
        if self._summary is None:
            self._summary = _Summary([r for r in self._records if r is not None])
        return found

    def volatile(self) -> dict[int, str]:
        """Return the modules that count as changed at every call, with the name of an attribute that is why."""
        return {i: r.unseen for i, r in enumerate(self._records) if r is not None and r.unseen is not None}

    def accept(self, indices: Iterable[int]) -> None:
        """Record the present state of these modules."""
        for i in indices:
            before, now = self._records[i], self._record(self._modules[i])
            self._records[i] = now
            if before is None or before.unseen is None or now.unseen is None:
                self._summary = None

    def _record(self, module: nn.Module) -> "_Record":
        attributes = vars(module)
        search = Search(self._known)
        for name, value in attributes.items():
            if name not in TABLES and name not in STATE_DICT_HOOKS:
                search.add(name, value)
        hooks = [v for k, v in attributes.items() if k in STATE_DICT_HOOKS and isinstance(v, CONTAINERS)]
        is_volatile = search.unseen is not None
        return _Record(
            kind=type(module),
            names=list(attributes),
            # Kept values would be kept memory: a replica's tensors are others at every call.
            values=[] if is_volatile else list(attributes.values()),
            contents=contents_of(*([], []) if is_volatile else ([*search.containers, *hooks], search.functions)),
            unseen=search.unseen,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A module's plain attributes at the last call."""

    kind: type
    names: list[str]
    values: list[Any]
    contents: Contents
    unseen: str | None
    """Name of an attribute whose changes can't be detected: such modules are updated every time."""


class _Summary:
    """All records concatenated, so that one comparison tells whether any module has changed: usually none has."""

    def __init__(self, records: Sequence[_Record]) -> None:
        self.volatile = [i for i, r in enumerate(records) if r.unseen is not None]
        self._steady = [i for i, r in enumerate(records) if r.unseen is None]
        steady = [records[i] for i in self._steady]
        self._kinds = [r.kind for r in steady]
        self._names = list(_chain(r.names for r in steady))
        self._values = list(_chain(r.values for r in steady))
        self._contents = joined([r.contents for r in steady])

    def is_current(self, modules: Sequence[nn.Module]) -> bool:
        """Tell whether all but the volatile modules are as recorded."""
        steady = [modules[i] for i in self._steady]
        tables = list(map(vars, steady))
        values = list(_chain(table.values() for table in tables))
        return (
            len(values) == len(self._values)
            and all(map(operator.is_, values, self._values))
            and list(_chain(tables)) == self._names
            and list(map(type, steady)) == self._kinds
            and self._contents.is_same()
        )


def _is_current(record: _Record | None, module: nn.Module) -> bool:
    if record is None or record.unseen is not None or record.kind is not type(module):
        return False
    attributes = vars(module)
    values = attributes.values()
    return (
        len(values) == len(record.values)
        and all(map(operator.is_, values, record.values))
        and list(attributes) == record.names
        and record.contents.is_same()
    )
