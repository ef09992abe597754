"""What modules' attributes hold at every depth, recorded so that one comparison finds whether anything has changed."""

import itertools
import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from everygpu import tree
from everygpu.parallel.replicas.remap import CONSTANTS, TABLES, is_constant, open_callable, open_value

STATE_DICT_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""No forward reads these; torch's weight_norm has such a hook, and so have many libraries' layers."""

_chain = itertools.chain.from_iterable


class Snapshot:
    """Modules' attributes as they were when ``changed`` was called last.

    Args:
        modules: All of a tree.
        known: Other modules and tensors that the caller compares itself: in attributes they are compared by identity.
            A module that leads to any other tensor is volatile: it counts as changed at every call.
    """

    def __init__(self, modules: Sequence[nn.Module], known: Iterable[nn.Module | Tensor] = ()) -> None:
        self.volatile: dict[int, str] = {}
        """The indices of volatile modules, with the name of an attribute that is why."""
        self._modules = modules
        self._known: dict[int, Any] = {id(x): x for x in (*modules, *known)}
        self._each: list[Contents | None] = [None] * len(modules)
        self._containers: list[set[int]] = [set() for _ in modules]
        self._linked: list[set[int]] = []
        # All records as one, so that one comparison finds whether any module has changed: usually none has.
        self._all: Contents | None = None

    def is_same(self) -> bool:
        """Whether no module has changed since ``changed`` was called."""
        return not self.volatile and self._all is not None and self._all.is_same()

    def changed(self) -> list[int]:
        """Return the indices of the modules that have changed since the last call, and record their state.

        A change includes modules that share a container with it: so do the replicas' copies.
        """
        if self._all is not None and self._all.is_same():
            found = set(self.volatile)
        else:
            found = {i for i, c in enumerate(self._each) if c is None or i in self.volatile or not c.is_same()}
        size = -1
        while self._linked and size != len(found):
            size = len(found)
            found.update(*(group for group in self._linked if not group.isdisjoint(found)))
        self.accept(found)
        if self._all is None:
            self._join()
        return sorted(found)

    def _join(self) -> None:
        each = [c for c in self._each if c is not None]
        self._all = Contents(*(list(_chain(parts)) for parts in zip(*(c.parts for c in each))))
        owners: dict[int, set[int]] = {}
        for i, ids in enumerate(self._containers):
            for container in ids:
                owners.setdefault(container, set()).add(i)
        self._linked = [modules for modules in owners.values() if len(modules) > 1]

    def accept(self, indices: Iterable[int]) -> None:
        """Record the present state of these modules."""
        for i in indices:
            was_volatile = i in self.volatile
            self._each[i] = self._record(i)
            if not (was_volatile and i in self.volatile):
                self._all = None

    def _record(self, index: int) -> "Contents":
        module = self._modules[index]
        search = Search(self._known)
        for name, value in vars(module).items():
            if name not in TABLES and name not in STATE_DICT_HOOKS:
                search.add(name, value)
        self._containers[index] = set(map(id, search.containers))
        self.volatile.pop(index, None)
        if search.unseen is not None:
            self.volatile[index] = search.unseen
            return Contents([], [], [])  # kept values would be kept memory: a replica's tensors are others each time
        hooks = [v for k, v in vars(module).items() if k in STATE_DICT_HOOKS and isinstance(v, (dict, list))]
        return Contents([*search.containers, *hooks], search.functions, [module])


class Contents:
    """Containers, functions and the attributes of modules, with what was in them.

    Compared by identity and in order: equal values of other types, or in another order, are a change.
    """

    def __init__(self, containers: list[Any], functions: list[Any], modules: list[nn.Module]) -> None:
        self.parts = containers, functions, modules
        self._dicts, self._kinds = list(map(vars, modules)), list(map(type, modules))
        self._empty = [c for c in containers if not c]  # as most of a module's hooks are
        filled = [c for c in containers if c]
        tables = [c for c in filled if isinstance(c, dict)]
        self._names = list(_chain(self._dicts))
        self._views: list[Any] = [table.values() for table in (*self._dicts, *tables)]
        self._views += [*tables, *(c for c in filled if not isinstance(c, dict))]  # a dict is a view of its keys
        self._lengths, self._items = list(map(len, self._views)), list(_chain(self._views))
        self._referents = list(map(_referents, functions))

    def is_same(self) -> bool:
        """Whether everything holds what it did."""
        _, functions, modules = self.parts
        return (
            not any(self._empty)
            and list(map(len, self._views)) == self._lengths
            and list(_chain(self._dicts)) == self._names
            and all(map(operator.is_, _chain(self._views), self._items))
            and all(map(operator.is_, map(vars, modules), self._dicts))
            and list(map(type, modules)) == self._kinds
            and all(map(tree.are_same, map(_referents, functions), self._referents))
        )


class Search:
    """Searches attributes for what replicas have copies of, containers and functions, at every depth; see ``Remap``."""

    def __init__(self, known: Mapping[int, Any]) -> None:
        self._known = known
        self._seen: set[int] = set()
        self.containers: list[Any] = []
        self.functions: list[Any] = []
        self.unseen: str | None = None

    def add(self, name: str, value: Any) -> None:
        """Search an attribute."""
        if not self._search(value) and self.unseen is None:
            self.unseen = name

    def _search(self, value: Any, *, is_referent: bool = False) -> bool:
        """Note what has to be compared; return whether all of it can be."""
        if is_constant(value) or id(value) in self._known or id(value) in self._seen:
            return True
        if isinstance(value, Tensor):
            return False
        self._seen.add(id(value))
        if isinstance(value, weakref.ref):
            referent = value()
            return referent is None or id(referent) in self._known or not isinstance(referent, Tensor)
        opened = open_value(value, is_referent=is_referent)
        if opened is None:
            return True
        if opened.is_callable:
            self.functions.append(value)
        elif opened.is_mutable:
            self.containers.append(value)
        # Constants are left out first: a vocabulary has a hundred thousand.
        rest = [part for part in opened.children if type(part) not in CONSTANTS]
        return all(self._search(part, is_referent=is_referent or opened.is_callable) for part in rest)


def _referents(function: Any) -> tuple[Any, ...]:
    opened = open_callable(function)
    return () if opened is None else opened.children
