"""A replica of a module tree, and how it follows the original's Python state.

A replica is made once. Before each forward its plain attributes (flags, containers, hooks, patched methods)
are brought up to date with the original's, so it behaves as a copy made at that moment would.
"""

import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everygpu import tree
from everygpu.keys import wrapped_child

TABLES = ("_parameters", "_buffers", "_modules")
"""What a module keeps its tensors and children in; filled by the replica's owner, not copied."""

_INERT_TYPES = frozenset(
    {int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, type}
)
"""Values that can't refer to the module tree and compare by value."""

Translate = Callable[[Any], Any]

_CONTAINERS = (dict, list, set, tuple)


class Watch:
    """Notices which modules' plain attributes have changed since it last looked."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._records: list[_Record | None] = [None] * len(modules)

    def changed(self) -> list[int]:
        """Return the indices of the modules whose replicas are out of date."""
        found = [i for i, m in enumerate(self._modules) if not _is_current(self._records[i], m)]
        for i in found:
            self._records[i] = _record(self._modules[i])
        return found


class Mirror:
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
            if wrapped_child(original) == "_orig_mod":
                self._twins[id(original)] = self._twins[id(original.get_submodule("_orig_mod"))]
        for original, twin in zip(modules, self.modules):
            children = {k: None if c is None else self._twins[id(c)] for k, c in original._modules.items()}
            twin._modules.update(children)
        self._stale = set(range(len(modules)))
        self._busy: set[int] = set()

    @property
    def root(self) -> nn.Module:
        """The replica of the whole model."""
        return self._twins[id(self._originals[0])]

    def expire(self, indices: Iterable[int]) -> None:
        """Note that these modules' attributes have changed."""
        self._stale.update(indices)

    def follow(self, tensors: Mapping[int, Tensor]) -> None:
        """Bring the plain attributes of changed modules up to date.

        Args:
            tensors: From ``id`` of each of the original's parameters and buffers to the replica's.
        """
        for index in self._stale:
            original, twin = vars(self._originals[index]), vars(self.modules[index])
            tables = {name: twin[name] for name in TABLES}
            twin.clear()
            twin.update((k, self._translate(v, tensors)) for k, v in original.items() if k not in tables)
            twin.update(tables)
        self._stale.clear()

    def _translate(self, value: Any, tensors: Mapping[int, Tensor]) -> Any:
        """Turn a value of the original into what the replica should have in its place."""
        kind = type(value)
        if kind in _INERT_TYPES:
            return value
        if isinstance(value, nn.Module):
            return self._twins.get(id(value), value)
        if isinstance(value, Tensor):
            twin = tensors.get(id(value))
            return self._carry(value) if twin is None else twin
        rebuild = _rebuilder(value)
        if rebuild is None or id(value) in self._busy:  # a leaf, or something that contains itself
            return value
        self._busy.add(id(value))
        try:
            return rebuild(value, functools.partial(self._translate, tensors=tensors))
        finally:
            self._busy.discard(id(value))

    def _carry(self, x: Tensor) -> Tensor:
        """Copy a plain tensor attribute, as the original would have on its own device."""
        if x.device.type == "cpu" and self._device.type != "cpu":
            return x
        return x.to(self._device, copy=not x.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A module's plain attributes as they were."""

    names: list[str]
    values: list[Any]
    mutable: list[Any]
    contents: list[Any]
    volatile: bool
    """Holds something whose change can't be seen from outside: it is translated every time."""


def _record(module: nn.Module) -> _Record:
    attributes = vars(module)
    plain = [v for k, v in attributes.items() if k not in TABLES]
    mutable = [v for v in plain if isinstance(v, (dict, list, set))]
    loose = [v for v in plain if isinstance(v, _CONTAINERS) and not _is_inert(v)]
    return _Record(
        names=list(attributes),
        values=list(attributes.values()),
        mutable=mutable,
        contents=[copy.copy(v) for v in mutable] if not loose else [],
        volatile=bool(loose) or any(isinstance(v, (Tensor, weakref.ref)) for v in plain),
    )


def _is_current(record: "_Record | None", module: nn.Module) -> bool:
    if record is None or record.volatile:
        return False
    attributes = vars(module)
    values = attributes.values()
    if len(values) != len(record.values) or not all(map(_is, values, record.values)):
        return False
    return list(attributes) == record.names and _equal(record.mutable, record.contents)


def _is(a: object, b: object) -> bool:
    return a is b


def _equal(a: list[Any], b: list[Any]) -> bool:
    try:
        return a == b
    except (RuntimeError, TypeError, ValueError):  # something came in that doesn't compare, such as a tensor
        return False


def _is_inert(container: Any) -> bool:
    items = [*container.keys(), *container.values()] if isinstance(container, dict) else container
    return set(map(type, items)) <= _INERT_TYPES


def _blank_copy(original: nn.Module) -> nn.Module:
    # Not type(original)(): the constructor's arguments are unknown. Not copy.copy: classes may define it.
    twin: nn.Module = object.__new__(type(original))
    vars(twin).update({name: {} for name in TABLES})
    return twin


def _rebuilder(value: Any) -> Callable[[Any, Translate], Any] | None:
    if isinstance(value, (dict, list, tuple)):
        return _rebuild_container
    if isinstance(value, (set, frozenset)):
        return _rebuild_set
    return _REBINDERS.get(type(value))


def _rebuild_container(value: Any, translate: Translate) -> Any:
    opened = tree.open_container(value)
    if opened is None:
        return value
    children = [translate(child) for child in opened.children]
    if isinstance(value, tuple) and all(map(_is, children, opened.children)):
        return value
    return opened.rebuild(children)


def _rebuild_set(value: Any, translate: Translate) -> Any:
    return type(value)(map(translate, value)) if type(value) in (set, frozenset) else copy.copy(value)


def _rebind_method(value: types.MethodType, translate: Translate) -> Any:
    owner = translate(value.__self__)
    return value if owner is value.__self__ else types.MethodType(value.__func__, owner)


def _rebind_partial(value: functools.partial[Any], translate: Translate) -> Any:
    function, args, keywords = translate(value.func), translate(value.args), translate(value.keywords)
    twin = functools.partial(function, *args, **keywords)
    vars(twin).update({k: translate(v) for k, v in vars(value).items()})
    return twin


def _rebind_function(value: types.FunctionType, translate: Translate) -> Any:
    """Rebuild a closure whose cells refer to the module tree: ``old = m.forward; m.forward = lambda x: old(x)``."""
    cells = value.__closure__ or ()
    contents = [_cell_contents(cell) for cell in cells]
    new = [translate(c) for c in contents]
    if all(map(_is, contents, new)):
        return value
    closure = tuple(cell if a is b else types.CellType(b) for cell, a, b in zip(cells, contents, new))
    twin = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
    twin.__kwdefaults__ = value.__kwdefaults__
    twin.__doc__, twin.__qualname__ = value.__doc__, value.__qualname__
    vars(twin).update(vars(value))
    return twin


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _rebind_weakref(value: "weakref.ref[Any]", translate: Translate) -> Any:
    target = value()
    twin = translate(target)
    return value if twin is target else weakref.ref(twin)


_REBINDERS: dict[type, Callable[[Any, Translate], Any]] = {
    types.MethodType: _rebind_method,
    functools.partial: _rebind_partial,
    types.FunctionType: _rebind_function,
    weakref.ref: _rebind_weakref,
}
