"""What modules' attributes hold at every depth, recorded so that one comparison tells whether anything has changed."""

import dataclasses
import itertools
import operator
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from everygpu.parallel.replicas.remap import CONSTANTS, TABLES, is_constant, open_callable, open_container

CONTAINERS = (dict, list, tuple, set, frozenset, deque)

STATE_DICT_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""No forward reads these; torch's weight_norm has such a hook, and so have many libraries' layers."""

_chain = itertools.chain.from_iterable
_values = operator.methodcaller("values")  # of a subclass in its own order, as OrderedDict's


class Snapshot:
    """Modules' attributes as they were when ``changed`` was called last.

    Args:
        modules: All of a tree.
        known: Other modules and tensors that the caller compares itself: in attributes they are compared by identity.
            A module that leads to any other tensor is volatile: it counts as changed at every call.
        is_strict: Look into all that forward may read, for a recording, and take a module for volatile, too, that has
            an object in a container. Else into what replicas have copies of; they share all other objects.
    """

    def __init__(
        self, modules: Sequence[nn.Module], known: Iterable[nn.Module | Tensor] = (), *, is_strict: bool = False
    ) -> None:
        self.volatile: dict[int, str] = {}
        """The indices of volatile modules, with the name of an attribute that is why."""
        self._modules = modules
        self._known: dict[int, Any] = {id(x): x for x in (*modules, *known)}
        self._is_strict = is_strict
        self._each: list[Contents | None] = [None] * len(modules)
        self._containers: list[set[int]] = [set() for _ in modules]
        self._linked: list[set[int]] = []
        # All records as one, so that one comparison tells whether any module has changed: usually none has.
        self._all: Contents | None = None

    def is_same(self) -> bool:
        """Tell whether no module has changed since ``changed`` was called."""
        return not self.volatile and self._all is not None and self._all.is_same()

    def changed(self) -> list[int]:
        """Return the indices of the modules that have changed since the last call, and record their state.

        With a module come those that share a container with it: replicas' share its copy then, too.
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
        search = Search(self._known, is_strict=self._is_strict)
        for name, value in vars(module).items():
            if name not in TABLES and name not in STATE_DICT_HOOKS:
                search.add(name, value)
        self._containers[index] = set(map(id, search.containers))
        self.volatile.pop(index, None)
        if search.unseen is not None:
            self.volatile[index] = search.unseen
            return Contents([], [], [])  # kept values would be kept memory: a replica's tensors are others each time
        hooks = [v for k, v in vars(module).items() if k in STATE_DICT_HOOKS and isinstance(v, CONTAINERS)]
        return Contents([*search.containers, *hooks], search.functions, [module])


class Contents:
    """Containers, functions and the attributes of modules, with what was in them.

    Compared by identity and in order: equal values of other types, or in another order, are a change.
    """

    def __init__(self, containers: list[Any], functions: list[Any], modules: list[nn.Module]) -> None:
        self.parts = containers, functions, modules
        self._dicts = list(map(vars, modules))
        self._kinds = list(map(type, modules))
        self._empty = [c for c in containers if not c]  # as most of a module's hooks are
        self._names = list(_chain(self._dicts))
        self._tables = [c for c in containers if c and isinstance(c, dict)]
        self._sequences = [c for c in containers if c and not isinstance(c, dict)]
        self._lengths = list(map(len, self._filled()))
        self._items = list(self._present())
        self._referents = list(map(_referents, functions))

    def is_same(self) -> bool:
        """Tell whether everything holds what it did."""
        _, functions, modules = self.parts
        return (
            not any(self._empty)
            and list(map(len, self._filled())) == self._lengths
            and list(_chain(self._dicts)) == self._names
            and all(map(operator.is_, self._present(), self._items))
            and all(map(operator.is_, map(vars, modules), self._dicts))
            and list(map(type, modules)) == self._kinds
            and all(map(_is_same, map(_referents, functions), self._referents))
        )

    def _filled(self) -> Iterator[Any]:
        return itertools.chain(self._dicts, self._tables, self._sequences)

    def _present(self) -> Iterator[Any]:
        values = map(_values, itertools.chain(self._dicts, self._tables))
        return itertools.chain(_chain(values), _chain(self._tables), _chain(self._sequences))


class Search:
    """Searches attributes for containers and functions whose contents can change, at every depth; see ``Snapshot``."""

    def __init__(self, known: Mapping[int, Any], *, is_strict: bool) -> None:
        self._known = known
        self._is_strict = is_strict
        self._seen: set[int] = set()
        self.containers: list[Any] = []
        self.functions: list[Any] = []
        self.unseen: str | None = None

    def add(self, name: str, value: Any) -> None:
        """Search an attribute.

        An object in an attribute of its own doesn't count as one that changes unseen; nor does what a function there
        refers to, unless it is a tensor: a recording runs no functions.
        """
        is_strict = self._is_strict and isinstance(value, CONTAINERS)
        if self._is_strict and not isinstance(value, (*CONTAINERS, Tensor)) and not _refers_to_tensors(value, set()):
            return
        if not self._search(value, is_strict=is_strict) and self.unseen is None:
            self.unseen = name

    def _search(self, value: Any, *, is_strict: bool, is_referent: bool = False) -> bool:
        """Note what has to be compared; tell whether there was nothing that can't be."""
        if is_constant(value) or id(value) in self._known or id(value) in self._seen:
            return True
        if isinstance(value, Tensor):
            return False
        self._seen.add(id(value))
        if isinstance(value, weakref.ref):
            referent = value()
            return referent is None or id(referent) in self._known or not (is_strict or isinstance(referent, Tensor))
        opened = open_callable(value)
        if opened is not None:
            self.functions.append(value)
            parts: Sequence[Any] | None = opened.children
        else:
            parts = self._open_any(value) if self._is_strict else self._open_copied(value, is_referent)
        if parts is None:
            return not is_strict
        is_referent = is_referent or opened is not None
        # Constants are left out first: a vocabulary has a hundred thousand.
        rest = [part for part in parts if type(part) not in CONSTANTS]
        found = [self._search(part, is_strict=is_strict, is_referent=is_referent) for part in rest]
        return all(found)

    def _open_copied(self, value: Any, is_referent: bool) -> Sequence[Any] | None:
        """Open what replicas have copies of, as ``Remap`` does."""
        opened = open_container(value)
        if opened is None or (is_referent and opened.is_mutable):
            return None
        if opened.is_mutable:
            self.containers.append(value)
        return opened.children

    def _open_any(self, value: Any) -> Sequence[Any] | None:
        """Return what an object refers to; None where that isn't known."""
        if isinstance(value, types.BuiltinFunctionType):
            return (value.__self__,)
        if isinstance(value, CONTAINERS):
            if type(value) is not OrderedDict and hasattr(value, "__dict__"):  # one of the user's classes
                self.containers.append(vars(value))
            if isinstance(value, (tuple, frozenset)):
                return list(tuple.__iter__(value) if isinstance(value, tuple) else value)
            self.containers.append(value)
            return [*value, *value.values()] if isinstance(value, dict) else list(value)
        params = getattr(value, "__dataclass_params__", None)
        if params is None:
            return None
        attributes: dict[str, Any] = getattr(value, "__dict__", {})
        in_slots = {f.name for f in dataclasses.fields(value)} - attributes.keys()
        if in_slots and not params.frozen:
            return None
        self.containers.append(attributes)
        return [*attributes.values(), *(getattr(value, name, None) for name in in_slots)]


def is_open(value: Any) -> bool:
    """Tell whether a value is an object that forward may read attributes of, such as a configuration."""
    is_known = isinstance(value, (type, types.ModuleType, types.FunctionType, Tensor, nn.Module, dict, list, set))
    return (
        not is_known and hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch.", "everygpu."))
    )


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
