"""Nested containers, opened one level at a time and built again around new contents.

A container is a tuple, list, dict or UserDict (and their subclasses: named tuples, ``torch.return_types``,
``ModelOutput``), a dataclass instance, or a type registered with torch's pytree. Everything else is a leaf.
An attribute that a container has beside its items is a child, too; one that shows an item follows that item.
"""

import copy
import dataclasses
import functools
import itertools
import sys
import types
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from everygpu.torch_private.pytree import SUPPORTED_NODES, tree_flatten, tree_unflatten

# torch.Size and PackedSequence are tuples whose items make sense only together.
_LEAF_TYPES = frozenset(
    {torch.Tensor, torch.nn.Parameter, torch.Size, torch.nn.utils.rnn.PackedSequence}
    | {int, float, str, bool, type(None)}
)
_PLAIN_TYPES = frozenset({int, float, str, bool, type(None)})
# Contents of these are no data of the caller's.
_OPAQUE_TYPES = (torch.Tensor, torch.nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)
_MOST_PARTS, _MOST_OBJECTS = 32, 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One opened container."""

    accessors: tuple[str, ...]
    """The expression from the container to each child: ``[0]``, ``["boxes"]``, ``.logits``."""
    children: tuple[Any, ...]
    """In the order of ``accessors``."""
    rebuild: Callable[[Sequence[Any]], Any]
    """Makes another container of this type around as many new children."""


def open_container(value: Any) -> Container | None:
    """Open one level of a container.

    Args:
        value: Anything.
    Returns:
        Its children and a function that rebuilds it around others, or None when it is a leaf.
    """
    kind = type(value)
    if kind in _LEAF_TYPES:
        return None
    if kind in (list, tuple):
        return Container(accessors=_indices(value), children=tuple(value), rebuild=kind)
    if isinstance(value, (dict, UserDict)):
        return _with_attributes(value, _open_mapping(value))
    if isinstance(value, (list, tuple)):
        return _with_attributes(value, _open_sequence(value))
    if kind in SUPPORTED_NODES:
        return _open_registered(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_attributes(value, _open_dataclass(value))
    return None


Opener = Callable[[Any], Container | None]
"""Opens one level, as ``open_container``; one that opens less has larger leaves."""


def leaves(tree: Any, path: str, open_node: Opener = open_container) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, depth first.

    Args:
        tree: A container or a leaf.
        path: Name of ``tree`` itself; the paths of the leaves begin with it.
        open_node: Tells containers from leaves.
    """
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


def fan_out(
    function: Callable[[Any], Sequence[Any]], tree: Any, num_copies: int, open_node: Opener = open_container
) -> list[Any]:
    """Build ``num_copies`` trees at once, with one value each for every leaf.

    Args:
        function: From a leaf to ``num_copies`` values.
        tree: A container or a leaf.
        num_copies: Number of trees to build.
        open_node: Tells containers from leaves.
    """
    opened = open_node(tree)
    if opened is None:
        return list(function(tree))
    columns = [fan_out(function, child, num_copies, open_node) for child in opened.children]
    return [opened.rebuild([column[i] for column in columns]) for i in range(num_copies)]


def find_tensor(value: Any) -> tuple[str, tuple[int, ...]] | None:
    """Find a tensor or array with dimensions within an object, which need not be a container.

    A tokenizer has a hundred thousand parts and no tensor: only the first parts of each object are searched.

    Returns:
        The expression from the object to it, such as ``.x``, and its shape; None where there is none.
    """
    if type(value) in _PLAIN_TYPES:
        return None
    for path, part in _parts_of(value):
        if has_dims(part):
            return path, shape_of(part)
    return None


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or array; of a nested tensor, which may have none, the number of its rows."""
    return (value.size(0),) if isinstance(value, torch.Tensor) and value.is_nested else tuple(value.shape)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors that ``find_tensor`` can find within an object, and it itself if it is one."""
    if type(value) in _PLAIN_TYPES:
        return []
    return [part for _, part in _parts_of(value) if isinstance(part, torch.Tensor)]


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object and what it holds, nearest first."""
    found, seen = [("", value)], {id(value)}
    for path, part in found:  # which grows meanwhile
        yield path, part
        if len(found) < _MOST_OBJECTS:
            new = [(path + accessor, held) for accessor, held in itertools.islice(_held_by(part), _MOST_PARTS)]
            found += [(name, held) for name, held in new if id(held) not in seen]
            seen.update(id(held) for _, held in new)


def has_dims(value: Any) -> bool:
    """Tell whether a value is a tensor or a NumPy array that may have rows."""
    return (isinstance(value, torch.Tensor) or is_array(value)) and value.ndim > 0


def is_array(value: Any) -> bool:
    """Tell whether a value is a NumPy array, without loading NumPy, which torch works without."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


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
        if "__slots__" in vars(kind):
            slots = [(name, slot) for name, slot in vars(kind).items() if isinstance(slot, types.MemberDescriptorType)]
            yield from ((f".{name}", slot.__get__(value)) for name, slot in slots if hasattr(value, name))


def _indices(value: Sequence[Any]) -> tuple[str, ...]:
    return tuple(f"[{i}]" for i in range(len(value)))


def _open_registered(value: Any) -> Container:
    children, spec = tree_flatten(value, is_leaf=lambda node: node is not value)
    return Container(
        accessors=_indices(children),
        children=tuple(children),
        rebuild=lambda new: tree_unflatten(list(new), spec),
    )


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
    return Container(accessors=accessors, children=tuple(value[key] for key in keys), rebuild=rebuild)


def _open_sequence(value: Any) -> Container:
    kind = type(value)

    def rebuild(new: Sequence[Any]) -> Any:
        if hasattr(kind, "_make"):
            return kind._make(new)
        if isinstance(value, tuple):
            # With attributes, the class may have a constructor of its own; torch's return types have neither.
            return _set_attributes(tuple.__new__(kind, new), vars(value)) if hasattr(value, "__dict__") else kind(new)
        rebuilt = copy.copy(value)
        rebuilt[:] = new
        return rebuilt

    fields = getattr(kind, "_fields", None)
    accessors = tuple(f".{name}" for name in fields) if fields else _indices(value)
    return Container(accessors=accessors, children=tuple(value), rebuild=rebuild)


def _open_dataclass(value: Any) -> Container:
    names = tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))

    def rebuild(new: Sequence[Any]) -> Any:
        # Not dataclasses.replace: __init__ may refuse or recompute fields. Frozen ones need object.__setattr__.
        rebuilt = copy.copy(value)
        for name, child in zip(names, new):
            object.__setattr__(rebuilt, name, child)
        return rebuilt

    return Container(
        accessors=tuple(f".{name}" for name in names),
        children=tuple(getattr(value, name) for name in names),
        rebuild=rebuild,
    )


def _with_attributes(value: Any, opened: Container) -> Container:
    """Add the attributes: one that is a child follows that child when rebuilt, others are children themselves."""
    own = getattr(value, "__dict__", None)
    if not own:
        return opened
    if own is value:  # self.__dict__ = self
        return dataclasses.replace(opened, rebuild=lambda new: _tie(opened.rebuild(new)))
    place_of, cached, more = _sort_attributes(value, own, opened)
    if not (place_of or cached):
        return opened

    def rebuild(new: Sequence[Any]) -> Any:
        rebuilt = opened.rebuild(new[: len(opened.children)])
        for name in cached:
            vars(rebuilt).pop(name, None)
        return _set_attributes(rebuilt, {name: new[i] for name, i in place_of.items()})

    return Container(
        accessors=(*opened.accessors, *(f".{name}" for name in more)),
        children=(*opened.children, *(own[name] for name in more)),
        rebuild=rebuild,
    )


def _sort_attributes(value: Any, own: dict[str, Any], opened: Container) -> tuple[dict[str, int], list[str], list[str]]:
    """Sort attributes: those that are a child, with its index; cached properties; those that are new children."""
    names = {accessor: i for i, accessor in enumerate(opened.accessors)}
    ids = {id(child): i for i, child in reversed(list(enumerate(opened.children)))}
    place_of: dict[str, int] = {}
    cached: list[str] = []
    more: list[str] = []
    for name, held in own.items():
        same_name = names.get(f'["{name}"]')
        if f".{name}" in names or held is value or (name == "data" and isinstance(value, UserDict)):
            continue
        if isinstance(getattr(type(value), name, None), functools.cached_property):
            cached.append(name)
        elif same_name is not None and opened.children[same_name] is held:
            place_of[name] = same_name
        elif type(held) in _PLAIN_TYPES:
            continue
        elif id(held) in ids:
            place_of[name] = ids[id(held)]
        else:
            place_of[name] = len(names) + len(more)
            more.append(name)
    return place_of, cached, more


def _tie(rebuilt: Any) -> Any:
    return _set_attributes(rebuilt, {"__dict__": rebuilt})


def _set_attributes(rebuilt: Any, attributes: Mapping[str, Any]) -> Any:
    for name, held in attributes.items():
        object.__setattr__(rebuilt, name, held)  # the class may set items in its own
    return rebuilt
