"""A replica of a module tree, and how it follows the original's Python state.

A replica is made once. Before each forward its plain attributes (flags, containers, hooks, patched methods)
are brought up to date with the original's, so it behaves as a copy made at that moment would.
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
"""What a module keeps its tensors and children in; filled by the replica's owner, not copied."""

STATE_DICT_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""No forward looks into these; torch's weight_norm has such a hook, and so have many libraries' layers."""

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
        self._twins = {id(m): twin for m, twin in zip(modules, self.modules)}
        for original in modules:
            # The wrapper torch.compile makes calls the very module it was made from.
            inner = compiled_original(original)
            if inner is not None:
                self._twins[id(original)] = self._twins[id(inner)]
        for original, twin in zip(modules, self.modules):
            children = {k: None if c is None else self._twins[id(c)] for k, c in original._modules.items()}
            twin._modules.update(children)
        # What forward does to a replica's attributes is undone before the next.
        self._watch = Watch(self.modules)
        self._stale = set(range(len(modules)))

    @property
    def root(self) -> nn.Module:
        """The replica of the whole model."""
        return self._twins[id(self._originals[0])]

    def expire(self, indices: Iterable[int]) -> None:
        """Note that these modules' attributes have changed in the original, and which have in the replica."""
        self._stale.update(indices, self._watch.changed())

    def release(self) -> None:
        """Drop the attributes that ``follow`` will set, and the tensors they hold."""
        for index in self._stale:
            twin = vars(self.modules[index])
            for name in [k for k in twin if k not in TABLES]:
                del twin[name]

    def follow(self, tensors: Mapping[int, Tensor]) -> None:
        """Bring the plain attributes of changed modules up to date.

        Args:
            tensors: From ``id`` of each of the original's parameters and buffers to the replica's.
        """
        translation = _AttributeRemapper(self._twins, tensors, self._device)
        for index in self._stale:
            original, twin = self._originals[index], self.modules[index]
            tables = {name: vars(twin)[name] for name in TABLES}
            attributes = {k: translation.of(v) for k, v in vars(original).items() if k not in tables}
            vars(twin).clear()
            vars(twin).update(tables | attributes)
            if type(twin) is not type(original):
                object.__setattr__(twin, "__class__", type(original))
        self._watch.accept(self._stale)
        self._stale.clear()


class _AttributeRemapper:
    """Turns values of the original into what a replica has in their place."""

    def __init__(self, twins: Mapping[int, nn.Module], tensors: Mapping[int, Tensor], device: torch.device) -> None:
        self._twins = twins
        self._tensors = tensors
        self._device = device
        self._done: dict[int, Any] = {}
        self._open: set[int] = set()

    def of(self, value: Any) -> Any:
        """Translate an attribute: containers are copied, so that replicas don't write into each other's."""
        if type(value) in _INERT_TYPES:
            return value
        if isinstance(value, Tensor) and id(value) not in self._tensors:
            return self._carry(value)
        if not isinstance(value, (dict, list, tuple, set, frozenset)):
            return self.reference(value)
        if id(value) in self._open:  # it contains itself
            return value
        self._open.add(id(value))
        try:
            return self._container(value)
        finally:
            self._open.discard(id(value))

    def reference(self, value: Any) -> Any:
        """Translate what a function refers to: things of the module tree. Everything else stays shared."""
        if isinstance(value, nn.Module):
            return self._twins.get(id(value), value)
        if isinstance(value, Tensor):
            return self._tensors.get(id(value), value)
        if id(value) in self._done:
            return self._done[id(value)]
        if isinstance(value, types.FunctionType):
            return rebind_function(value, self.reference, self._done)
        # Lists and dicts are the caller's own, for hooks to write into.
        opened = tree.open_container(value) if isinstance(value, tuple) else open_callable(value)
        if opened is None:
            return value
        self._done[id(value)] = value
        parts = [self.reference(part) for part in opened.children]
        if not all(map(operator.is_, parts, opened.children)):
            self._done[id(value)] = opened.rebuild(parts)
        return self._done[id(value)]

    def _container(self, value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            plain = type(value) in (set, frozenset)
            return type(value)(map(self.of, value)) if plain else copy.copy(value)
        opened = tree.open_container(value)
        if opened is None:
            return value
        children = [self.of(child) for child in opened.children]
        if isinstance(value, tuple) and all(map(operator.is_, children, opened.children)):
            return value
        return opened.rebuild(children)

    def _carry(self, x: Tensor) -> Tensor:
        """Copy a plain tensor attribute, as the original would have on its own device."""
        if x.device.type == "cpu" and self._device.type != "cpu":
            return x
        return comm.copy(x, self._device, fresh=not x.requires_grad)


class Watch:
    """Notices which modules' plain attributes have changed since it last looked."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._records: list[_Record | None] = [None] * len(modules)
        self._summary: _Summary | None = None

    def changed(self) -> list[int]:
        """Return the indices of the modules that differ from when this was last called, and take note of them."""
        if self._summary is not None and self._summary.is_current(self._modules):
            found = self._summary.volatile
        else:
            found = [i for i, m in enumerate(self._modules) if not _is_current(self._records[i], m)]
        self.accept(found)
        if self._summary is None:
            self._summary = _Summary([r for r in self._records if r is not None])
        return found

    def volatile(self) -> list[int]:
        """Return the indices of the modules that count as changed whenever they are looked at."""
        return [i for i, r in enumerate(self._records) if r is not None and r.volatile]

    def accept(self, indices: Iterable[int]) -> None:
        """Take note of these modules as they are now."""
        for i in indices:
            before, now = self._records[i], _record(self._modules[i])
            self._records[i] = now
            if before is None or not before.volatile or not now.volatile:
                self._summary = None


class _Summary:
    """All records side by side, so that one look tells whether any module has changed: most often none has."""

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
    """A module's plain attributes as they were."""

    kind: type
    names: list[str]
    values: list[Any]
    empty: list[Any]
    """Containers that had nothing in them, as most of a module's hooks."""
    filled: list[tuple[Any, Any]]
    """Other containers, each with a copy."""
    volatile: bool
    """Holds something whose change can't be seen from outside: it is translated every time."""


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
    twin: nn.Module = object.__new__(type(original))
    vars(twin).update({name: {} for name in TABLES})
    return twin
