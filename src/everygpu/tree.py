"""Nested containers, opened one level at a time and built again around new contents.

A container is a tuple, list, dict or UserDict (and their subclasses: named tuples, ``torch.return_types``,
``ModelOutput``), a dataclass instance, or a type registered with torch's pytree. Everything else is a leaf.
An attribute that a container has besides its items is also a child; one that shows an item follows that item.
"""

import copy
import dataclasses
import functools
import itertools
import operator
import sys
import types
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from everygpu.torch_private.core import SUPPORTED_NODES, tree_flatten, tree_unflatten

_PLAIN_TYPES = frozenset({int, float, str, bool, type(None)})
# torch.Size and PackedSequence are tuples whose items make sense only together.
_LEAF_TYPES = _PLAIN_TYPES | {torch.Tensor, torch.nn.Parameter, torch.Size, torch.nn.utils.rnn.PackedSequence}
# Contents of these are no data of the caller's.
_OPAQUE_TYPES = (torch.Tensor, torch.nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)
_MOST_PARTS, _MOST_OBJECTS = 32, 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Container:
    """One opened container."""

    accessors: tuple[str, ...]
    """The expression from the container to each child: ``[0]``, ``["boxes"]``, ``.logits``."""
    children: tuple[Any, ...]
    """In the order of ``accessors``."""
    rebuild: Callable[[Sequence[Any]], Any]
    """Makes another container of this type around as many new children."""


def open_container(value: Any) -> Container | None:
    """Open one level of a container: its children, and what builds it again around others; None for a leaf."""
    kind = type(value)
    if kind in _LEAF_TYPES:
        return None
    if kind in (list, tuple):
        return Container(_indices(value), tuple(value), kind)
    if isinstance(value, (dict, UserDict)):
        return _with_attributes(value, _open_mapping(value))
    if isinstance(value, (list, tuple)):
        return _with_attributes(value, _open_sequence(value))
    if kind in SUPPORTED_NODES:
        children, spec = tree_flatten(value, is_leaf=lambda node: node is not value)
        return Container(_indices(children), tuple(children), lambda new: tree_unflatten(list(new), spec))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_attributes(value, _open_dataclass(value))
    return None


Opener = Callable[[Any], Container | None]
"""Opens one level, as ``open_container``; one that opens less has larger leaves."""


def leaves(tree: Any, path: str, open_node: Opener = open_container) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, which begins with the tree's own, depth first."""
    opened = open_node(tree)
    if opened is None:
        yield path, tree
        return
    for accessor, child in zip(opened.accessors, opened.children):
        yield from leaves(child, path + accessor, open_node)


def map_leaves(function: Callable[[Any], Any], tree: Any, open_node: Opener = open_container) -> Any:
    """Build the same containers around ``function(leaf)`` of every leaf."""
    opened = open_node(tree)
    if opened is None:
        return function(tree)
    return opened.rebuild([map_leaves(function, child, open_node) for child in opened.children])


def are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def find_tensor(value: Any) -> tuple[str, tuple[int, ...]] | None:
    """Find a tensor or array with dimensions within an object, which need not be a container.

    Returns:
        The expression from the object to it, such as ``.x``, and its shape; None where there is none.
    """
    return next(((path, shape_of(part)) for path, part in _parts_of(value) if has_dims(part)), None)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors that ``find_tensor`` can find within an object, and it itself if it is one."""
    return [part for _, part in _parts_of(value) if isinstance(part, torch.Tensor)]


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or array; of a nested tensor, which may have none, the number of its rows."""
    return (value.size(0),) if isinstance(value, torch.Tensor) and value.is_nested else tuple(value.shape)


def has_dims(value: Any) -> bool:
    """Whether a value is a tensor or a NumPy array that may have rows."""
    return (isinstance(value, torch.Tensor) or is_array(value)) and value.ndim > 0


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array, without loading NumPy, which torch works without."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object and what it holds, nearest first; of each object the first parts, as a tokenizer has 100,000."""
    if type(value) in _PLAIN_TYPES:
        return
    found, seen = [("", value)], {id(value)}
    for path, part in found:  # which grows meanwhile
        yield path, part
        if len(found) < _MOST_OBJECTS:
            new = [(path + accessor, held) for accessor, held in itertools.islice(_held_by(part), _MOST_PARTS)]
            found += [(name, held) for name, held in new if id(held) not in seen]
            seen.update(id(held) for _, held in new)


def _held_by(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's items, if its class is built in, and its attributes, each with its accessor."""
    if type(value) in _PLAIN_TYPES or isinstance(value, _OPAQUE_TYPES):
        return
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", held) for key, held in value.items())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{i}]", held) for i, held in enumerate(value))
    yield from ((f".{name}", held) for name, held in (getattr(value, "__dict__", None) or {}).items())
    for kind in type(value).__mro__:
        slots = vars(kind).items() if "__slots__" in vars(kind) else ()
        members = ((name, slot) for name, slot in slots if isinstance(slot, types.MemberDescriptorType))
        yield from ((f".{name}", slot.__get__(value)) for name, slot in members if hasattr(value, name))


def _indices(value: Sequence[Any]) -> tuple[str, ...]:
    return tuple(f"[{i}]" for i in range(len(value)))


def _open_mapping(value: Any) -> Container:
    keys = tuple(value.keys())

    def rebuild(new: Sequence[Any]) -> Any:
        if type(value) is dict:
            return dict(zip(keys, new))
        # A shallow copy keeps what the subclass adds (attributes, a default factory) without calling __init__.
        rebuilt = copy.copy(value)
        for key, child in zip(keys, new):
            rebuilt[key] = child
        return rebuilt

    accessors = tuple(f'["{key}"]' if isinstance(key, str) else f"[{key!r}]" for key in keys)
    return Container(accessors, tuple(value[key] for key in keys), rebuild)


def _open_sequence(value: Any) -> Container:
    kind = type(value)

    def rebuild(new: Sequence[Any]) -> Any:
        if hasattr(kind, "_make"):
            return kind._make(new)
        if isinstance(value, tuple):
            # With attributes, the class may have a constructor of its own; torch's return types have neither.
            return _set(tuple.__new__(kind, new), vars(value).items()) if hasattr(value, "__dict__") else kind(new)
        rebuilt = copy.copy(value)
        rebuilt[:] = new
        return rebuilt

    fields = getattr(kind, "_fields", None)
    return Container(tuple(f".{name}" for name in fields) if fields else _indices(value), tuple(value), rebuild)


def _open_dataclass(value: Any) -> Container:
    names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
    # Not dataclasses.replace: __init__ may refuse or recompute fields.
    rebuild: Callable[[Sequence[Any]], Any] = lambda new: _set(copy.copy(value), zip(names, new))  # noqa: E731
    return Container(tuple(f".{name}" for name in names), tuple(getattr(value, name) for name in names), rebuild)


def _with_attributes(value: Any, opened: Container) -> Container:
    """Add the attributes: one that is a child follows that child when rebuilt, others are children themselves."""
    own = getattr(value, "__dict__", None)
    if not own:
        return opened
    if own is value:  # self.__dict__ = self

        def tie(new: Sequence[Any]) -> Any:
            rebuilt = opened.rebuild(new)
            return _set(rebuilt, [("__dict__", rebuilt)])

        return dataclasses.replace(opened, rebuild=tie)
    names = {accessor: i for i, accessor in enumerate(opened.accessors)}
    indices = {id(child): i for i, child in reversed(list(enumerate(opened.children)))}
    followed: dict[str, int] = {}
    computed: list[str] = []
    more: list[str] = []
    for name, held in own.items():
        same_name = names.get(f'["{name}"]')
        if f".{name}" in names or held is value or (name == "data" and isinstance(value, UserDict)):
            continue
        if isinstance(getattr(type(value), name, None), functools.cached_property):
            computed.append(name)
        elif same_name is not None and opened.children[same_name] is held:
            followed[name] = same_name
        elif type(held) in _PLAIN_TYPES:
            continue
        elif id(held) in indices:
            followed[name] = indices[id(held)]
        else:
            followed[name] = len(opened.children) + len(more)
            more.append(name)
    if not (followed or computed):
        return opened

    def rebuild(new: Sequence[Any]) -> Any:
        rebuilt = opened.rebuild(new[: len(opened.children)])
        for name in computed:
            vars(rebuilt).pop(name, None)
        return _set(rebuilt, ((name, new[i]) for name, i in followed.items()))

    accessors = (*opened.accessors, *(f".{name}" for name in more))
    return Container(accessors, (*opened.children, *(own[name] for name in more)), rebuild)


def _set(rebuilt: Any, attributes: Iterable[tuple[str, Any]]) -> Any:
    """Set attributes, past classes that are frozen or set items in ``__setattr__``."""
    for name, held in attributes:
        object.__setattr__(rebuilt, name, held)
    return rebuilt
