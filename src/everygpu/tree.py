"""Nested containers, opened one level at a time and built again around new contents.

A container is a tuple, list, dict or UserDict (and their subclasses: named tuples, ``torch.return_types``,
``ModelOutput``), a dataclass instance, or a type registered with torch's pytree. Everything else is a leaf.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree

# Sizes and packed sequences are tuples by accident: their parts make sense only together.
_LEAF_TYPES = frozenset(
    {torch.Tensor, torch.nn.Parameter, torch.Size, torch.nn.utils.rnn.PackedSequence}
    | {int, float, str, bool, type(None)}
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One opened container."""

    accessors: tuple[str, ...]
    """What follows the container's name to reach each child: ``[0]``, ``["boxes"]``, ``.logits``."""
    children: tuple[Any, ...]
    """In the order of ``accessors``."""
    rebuild: Callable[[Sequence[Any]], Any]
    """Makes another container of this type around as many new children."""


def open_container(value: Any) -> Container | None:
    """Open one level of a container.

    Args:
        value: Anything.
    Returns:
        Its children and the way to build another one, or None when it is a leaf.
    """
    kind = type(value)
    if kind in _LEAF_TYPES:
        return None
    if kind in (list, tuple):
        return Container(accessors=_indices(value), children=tuple(value), rebuild=kind)
    if isinstance(value, (dict, UserDict)):
        return _open_mapping(value)
    if isinstance(value, (list, tuple)):
        return _open_sequence(value)
    if kind in _pytree.SUPPORTED_NODES:
        return _open_registered(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _open_dataclass(value)
    return None


def leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, depth first.

    Args:
        tree: A container or a leaf.
        path: Name of ``tree`` itself; the paths of the leaves begin with it.
    """
    opened = open_container(tree)
    if opened is None:
        yield path, tree
        return
    for accessor, child in zip(opened.accessors, opened.children):
        yield from leaves(child, path + accessor)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Build the same containers around ``function(leaf)`` of every leaf."""
    opened = open_container(tree)
    if opened is None:
        return function(tree)
    return opened.rebuild([map_leaves(function, child) for child in opened.children])


def fan_out(function: Callable[[Any], Sequence[Any]], tree: Any, num_copies: int) -> list[Any]:
    """Build ``num_copies`` trees at once; each leaf decides what each of them gets.

    Args:
        function: From a leaf to ``num_copies`` values.
        tree: A container or a leaf.
        num_copies: Number of trees to build.
    """
    opened = open_container(tree)
    if opened is None:
        return list(function(tree))
    columns = [fan_out(function, child, num_copies) for child in opened.children]
    return [opened.rebuild([column[i] for column in columns]) for i in range(num_copies)]


def _indices(value: Sequence[Any]) -> tuple[str, ...]:
    return tuple(f"[{i}]" for i in range(len(value)))


def _open_registered(value: Any) -> Container:
    children, spec = _pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
    return Container(
        accessors=_indices(children),
        children=tuple(children),
        rebuild=lambda new: _pytree.tree_unflatten(list(new), spec),
    )


def _open_mapping(value: Any) -> Container:
    keys = tuple(value.keys())

    def rebuild(new: Sequence[Any]) -> Any:
        if type(value) is dict:
            return dict(zip(keys, new))
        # A shallow copy keeps what the subclass adds (attributes, a default factory) without calling __init__.
        twin = copy.copy(value)
        for key, child in zip(keys, new):
            twin[key] = child
        return twin

    accessors = tuple(f'["{key}"]' if isinstance(key, str) else f"[{key!r}]" for key in keys)
    return Container(accessors=accessors, children=tuple(value[key] for key in keys), rebuild=rebuild)


def _open_sequence(value: Any) -> Container:
    kind = type(value)

    def rebuild(new: Sequence[Any]) -> Any:
        if hasattr(kind, "_make"):
            return kind._make(new)
        if isinstance(value, tuple):
            return kind(new)
        twin = copy.copy(value)
        twin[:] = new
        return twin

    fields = getattr(kind, "_fields", None)
    accessors = tuple(f".{name}" for name in fields) if fields else _indices(value)
    return Container(accessors=accessors, children=tuple(value), rebuild=rebuild)


def _open_dataclass(value: Any) -> Container:
    names = tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))

    def rebuild(new: Sequence[Any]) -> Any:
        # Not dataclasses.replace: __init__ may refuse or recompute fields. Frozen ones need object.__setattr__.
        twin = copy.copy(value)
        for name, child in zip(names, new):
            object.__setattr__(twin, name, child)
        return twin

    return Container(
        accessors=tuple(f".{name}" for name in names),
        children=tuple(getattr(value, name) for name in names),
        rebuild=rebuild,
    )
