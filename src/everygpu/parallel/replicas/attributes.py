"""A replica of a module tree, and updates of its Python state from the original's.

A replica is built once. Before each forward its plain attributes (flags, containers, hooks, patched methods)
are updated from the original's, so it behaves as a copy made at that moment would.
"""

import copy
import itertools
import operator
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everygpu import comm, tree
from everygpu.keys import compiled_original
from everygpu.parallel.replicas.callables import open_callable, rebind_function

TABLES = ("_parameters", "_buffers", "_modules")
"""The tables of a module's tensors and children; filled by the replica's owner, not copied."""

STATE_DICT_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""No forward reads these; torch's weight_norm has such a hook, and so have many libraries' layers."""

_INERT_TYPES = frozenset(
    {int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, type}
)
"""Values that can't refer to the module tree."""


class ReplicaModule:
    """One replica of a module tree.

    Args:
        modules: The original's modules, the root first, each once.
        device: Where the replica lives.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._originals = modules
        self._device = device
        self.modules = [_blank_copy(m) for m in modules]
        self._replica_of = {id(m): replica for m, replica in zip(modules, self.modules)}
        for original in modules:
            # torch.compile's wrapper calls the module that it was made from.
            inner = compiled_original(original)
            if inner is not None:
                self._replica_of[id(original)] = self._replica_of[id(inner)]
        for original, replica in zip(modules, self.modules):
            children = {k: None if c is None else self._replica_of[id(c)] for k, c in original._modules.items()}
            replica._modules.update(children)
        # Changes that forward makes to a replica's attributes are undone before the next.
        self._watch = Watch(self.modules)
        self._stale = set(range(len(modules)))

    @property
    def root(self) -> nn.Module:
        """The replica of the whole model."""
        return self._replica_of[id(self._originals[0])]

    def expire(self, indices: Iterable[int]) -> None:
        """Mark these modules as changed in the original, and those that have changed in the replica."""
        self._stale.update(indices, self._watch.changed())

    def release(self) -> None:
        """Drop the attributes that ``update`` will set, and the tensors in them."""
        for index in self._stale:
            replica = vars(self.modules[index])
            for name in [k for k in replica if k not in TABLES]:
                del replica[name]

    def update(self, tensors: Mapping[int, Tensor]) -> None:
        """Update the plain attributes of changed modules.

        Args:
            tensors: From ``id`` of each of the original's parameters and buffers to the replica's.
        """
        remapper = _AttributeRemapper(self._replica_of, tensors, self._device)
        for index in self._stale:
            original, replica = self._originals[index], self.modules[index]
            tables = {name: vars(replica)[name] for name in TABLES}
            attributes = {k: remapper.remap(v) for k, v in vars(original).items() if k not in tables}
            vars(replica).clear()
            vars(replica).update(tables | attributes)
            if type(replica) is not type(original):
                object.__setattr__(replica, "__class__", type(original))
        self._watch.accept(self._stale)
        self._stale.clear()


class _AttributeRemapper:
    """Maps values of the original to the replica's."""

    def __init__(
        self, replica_of: Mapping[int, nn.Module], tensors: Mapping[int, Tensor], device: torch.device
    ) -> None:
        self._replica_of = replica_of
        self._tensors = tensors
        self._device = device
        self._done: dict[int, Any] = {}
        self._in_progress: set[int] = set()

    def remap(self, value: Any) -> Any:
        """Map an attribute: containers are copied, so that replicas don't write into each other's."""
        if type(value) in _INERT_TYPES:
            return value
        if isinstance(value, Tensor) and id(value) not in self._tensors:
            return self._copy_tensor(value)
        if not isinstance(value, (dict, list, tuple, set, frozenset)):
            return self.remap_reference(value)
        if id(value) in self._in_progress:  # a container that contains itself
            return value
        self._in_progress.add(id(value))
        try:
            return self._container(value)
        finally:
            self._in_progress.discard(id(value))

    def remap_reference(self, value: Any) -> Any:
        """Map a function's referent if it is part of the module tree; everything else stays shared."""
        if isinstance(value, nn.Module):
            return self._replica_of.get(id(value), value)
        if isinstance(value, Tensor):
            return self._tensors.get(id(value), value)
        if id(value) in self._done:
            return self._done[id(value)]
        if isinstance(value, types.FunctionType):
            return rebind_function(value, self.remap_reference, self._done)
        # Lists and dicts are the caller's own, for hooks to write into.
        opened = tree.open_container(value) if isinstance(value, tuple) else open_callable(value)
        if opened is None:
            return value
        self._done[id(value)] = value
        parts = [self.remap_reference(part) for part in opened.children]
        if not all(map(operator.is_, parts, opened.children)):
            self._done[id(value)] = opened.rebuild(parts)
        return self._done[id(value)]

    def _container(self, value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            plain = type(value) in (set, frozenset)
            return type(value)(map(self.remap, value)) if plain else copy.copy(value)
        opened = tree.open_container(value)
        if opened is None:
            return value
        children = [self.remap(child) for child in opened.children]
        if isinstance(value, tuple) and all(map(operator.is_, children, opened.children)):
            return value
        return opened.rebuild(children)

    def _copy_tensor(self, x: Tensor) -> Tensor:
        """Copy a plain tensor attribute to the replica's device; one on the CPU stays there, as in the original."""
        if x.device.type == "cpu" and self._device.type != "cpu":
            return x
        return comm.copy(x, self._device, fresh=not x.requires_grad)


class Watch:
    """Finds the modules whose plain attributes have changed since the last call."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
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

    def volatile(self) -> list[int]:
        """Return the indices of the modules that count as changed at every call."""
        return [i for i, r in enumerate(self._records) if r is not None and r.volatile]

    def accept(self, indices: Iterable[int]) -> None:
        """Record the present state of these modules."""
        for i in indices:
            before, now = self._records[i], _record(self._modules[i])
            self._records[i] = now
            if before is None or not before.volatile or not now.volatile:
                self._summary = None


class _Summary:
    """All records concatenated, so that one comparison tells whether any module has changed: usually none has."""

    def __init__(self, records: "Sequence[_Record]") -> None:
        self.volatile = [i for i, r in enumerate(records) if r.volatile]
        self._steady = [i for i, r in enumerate(records) if not r.volatile]
        steady = [records[i] for i in self._steady]
        self._kinds = [r.kind for r in steady]
        self._names = list(itertools.chain.from_iterable(r.names for r in steady))
        self._values = list(itertools.chain.from_iterable(r.values for r in steady))
        self._empty = list(itertools.chain.from_iterable(r.empty for r in steady))
        self._filled = list(itertools.chain.from_iterable(r.filled for r in steady))

    def is_current(self, modules: Sequence[nn.Module]) -> bool:
        """Tell whether all but the volatile modules are as recorded."""
        steady = [modules[i] for i in self._steady]
        tables = list(map(vars, steady))
        values = list(itertools.chain.from_iterable(table.values() for table in tables))
        return (
            len(values) == len(self._values)
            and all(map(operator.is_, values, self._values))
            and list(itertools.chain.from_iterable(tables)) == self._names
            and list(map(type, steady)) == self._kinds
            and not any(self._empty)
            and all(_same_items(now, before) for now, before in self._filled)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A module's plain attributes at the last call."""

    kind: type
    names: list[str]
    values: list[Any]
    empty: list[Any]
    """Containers that were empty, as most of a module's hooks are."""
    filled: list[tuple[Any, Any]]
    """Other containers, each with a copy."""
    volatile: bool
    """Whether a value's changes can't be detected: such modules are updated every time."""


def _record(module: nn.Module) -> _Record:
    attributes = vars(module)
    plain = {k: v for k, v in attributes.items() if k not in TABLES}
    mutable = [v for v in plain.values() if isinstance(v, (dict, list, set))]
    return _Record(
        kind=type(module),
        names=list(attributes),
        values=list(attributes.values()),
        empty=[v for v in mutable if not v],
        filled=[(v, copy.copy(v)) for v in mutable if v],
        volatile=any(_is_volatile(v) for k, v in plain.items() if k not in STATE_DICT_HOOKS),
    )


def _is_volatile(value: Any) -> bool:
    if isinstance(value, (dict, list, set, frozenset, tuple)):
        return not _is_inert(value)
    return isinstance(value, Tensor) or _refers_to_tensors(value, set())


def _is_inert(container: Any) -> bool:
    items = [*container.keys(), *container.values()] if isinstance(container, dict) else container
    return set(map(type, items)) <= _INERT_TYPES


def _refers_to_tensors(value: Any, seen: set[int]) -> bool:
    opened = open_callable(value) if id(value) not in seen else None
    if opened is None:
        return False
    seen.add(id(value))
    return any(isinstance(part, Tensor) or _refers_to_tensors(part, seen) for part in opened.children)


def _is_current(record: "_Record | None", module: nn.Module) -> bool:
    if record is None or record.volatile or record.kind is not type(module):
        return False
    attributes = vars(module)
    values = attributes.values()
    if len(values) != len(record.values) or not all(map(operator.is_, values, record.values)):
        return False
    if any(record.empty) or list(attributes) != record.names:
        return False
    return all(_same_items(now, before) for now, before in record.filled)


def _same_items(now: Any, before: Any) -> bool:
    """Compare by identity and in order: equal values of other types, or in another order, are a change."""
    if isinstance(now, set):
        return bool(now == before)
    keys_agree = not isinstance(now, dict) or (len(now) == len(before) and all(map(operator.is_, now, before)))
    items, old = (now.values(), before.values()) if isinstance(now, dict) else (now, before)
    return keys_agree and len(items) == len(old) and all(map(operator.is_, items, old))


def _blank_copy(original: nn.Module) -> nn.Module:
    # Not type(original)(): the constructor's arguments are unknown. Not copy.copy: classes may define it.
    replica: nn.Module = object.__new__(type(original))
    vars(replica).update({name: {} for name in TABLES})
    return replica
