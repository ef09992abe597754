"""Lists that may have an item per row: they are taken as torch.nn.DataParallel takes them, with a warning."""

import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from everygpu import tree

logger = logging.getLogger("everygpu")

_NUMBERS = (int, float, complex, bool, type(None), Tensor)


def warn_of_lists(
    named: Sequence[tuple[str, Any]], lists: Sequence[Sequence[Any]], num_rows: int, num_sized: int, dim: int
) -> None:
    """Warn once of each kind of list whose items may be rows of the batch, but aren't shared as such.

    Args:
        named: Arguments with their names, in which the lists are.
        lists: With two items or more.
        num_rows: Rows of the batch, 2 or more.
        num_sized: Tensors, arrays and the like in the arguments that have rows.
        dim: The dimension of the rows.
    """
    warned = warned_kinds()
    for items in lists:
        kind = type(items[0])
        if issubclass(kind, Tensor):
            if len(items) == num_sized and Tensor not in warned and _differ_elsewhere(items, num_rows, dim):
                warned.add(Tensor)
                _warn_of_tensors(_path_of(items, named), items, dim)
        elif len(items) == num_rows and kind not in warned and _may_be_rows(items[0]):
            warned.add(kind)
            _warn_of_objects(_path_of(items, named), items)


@functools.cache
def warn_of_entries(path: str, num_devices: int) -> None:
    """Warn once of a vector with as many numbers as there are devices, which other vectors may have by chance."""
    logger.warning(
        "scatter: %s has %d numbers, as many as there are devices, and other inputs agree on another number of rows: "
        "each replica gets the number at its device's position. Wrap it in everygpu.Replicated(...) if every replica "
        "needs all of them; in shape (%d, 1) they are taken so without this warning, which is said once.",
        path, num_devices, num_devices,
    )  # fmt: skip


@functools.cache
def warned_kinds() -> "weakref.WeakSet[type]":
    """Return the classes of items of whose lists this process has warned."""
    return weakref.WeakSet()


def _differ_elsewhere(items: Sequence[Any], num_rows: int, dim: int) -> bool:
    """Tell whether tensors with so many rows are of equal depth, and differ in another dimension."""
    first = items[0]
    if any(not isinstance(x, Tensor) or x.is_nested or x.ndim != first.ndim or x.shape[dim] != num_rows for x in items):
        return False
    at = dim % first.ndim
    return len({x.shape[:at] + x.shape[at + 1 :] for x in items}) > 1


def _may_be_rows(item: Any) -> bool:
    """Tell whether an item goes whole to every replica and is no number, of which lists are of sizes as often."""
    return not isinstance(item, _NUMBERS) and not any(tree.has_dims(leaf) for _, leaf in tree.leaves(item, ""))


def _path_of(wanted: Any, named: Sequence[tuple[str, Any]]) -> str:
    return next((path for name, value in named for path, found in _containers(value, name) if found is wanted), "")


def _containers(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    opened = tree.open_container(value)
    if opened is not None:
        yield path, value
        for accessor, child in zip(opened.accessors, opened.children):
            yield from _containers(child, path + accessor)


def _warn_of_objects(path: str, items: Sequence[Any]) -> None:
    kind = type(items[0]).__qualname__
    logger.warning(
        "scatter: %s is a %s of %d items (%s), as many as the batch has rows, and goes whole to every replica. Wrap it "
        "in everygpu.Rows(...) if each item is a row, in everygpu.Replicated(...) if every replica needs all of them. "
        "This is said once for items of this class.",
        path, type(items).__qualname__, len(items), kind,
    )  # fmt: skip


def _warn_of_tensors(path: str, items: Sequence[Any], dim: int) -> None:
    shapes = ", ".join(str(tuple(x.shape)) for x in items[:3])
    logger.warning(
        "scatter: %s is a %s of tensors of different shapes (%s%s), each of which is cut along dim %d, and no other "
        "input tells that the rows are there. Wrap it in everygpu.Rows(...) if each tensor is a row, as an image is, "
        "or in everygpu.Replicated(...) if every replica needs all of them; a dict says that the cut is right. This is "
        "said once.",
        path, type(items).__qualname__, shapes, ", …" if len(items) > 3 else "", dim,
    )  # fmt: skip
