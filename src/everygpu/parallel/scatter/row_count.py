"""How many rows a batch has, and what in it has them."""

import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everygpu import tree
from everygpu.errors import SplitError
from everygpu.parallel.scatter.batch_types import batch_type, open_batch
from everygpu.parallel.sharded.batch import ShardedBatch

logger = logging.getLogger("everygpu")

_NUMBERS = (int, float, complex, bool, type(None), Tensor)
_WITHOUT_ROWS = frozenset({int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size})

Named = Sequence[tuple[str, Any]]
"""Arguments with their names, such as ``("args[0]", x)``."""


def name_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Name the arguments of a call."""
    return [(f"args[{i}]", a) for i, a in enumerate(args)] + [(f'kwargs["{k}"]', v) for k, v in kwargs.items()]


def find_rows(named: Named, dim: int, num_devices: int = 0, *, warns: bool = False) -> int | None:
    """Read the batch size off the tensors of a call, and off what else has rows.

    Args:
        named: Arguments with their names; containers are searched.
        dim: The dimension along which tensors are split.
        num_devices: Devices that the rows are for; 0 if that isn't known. See ``has_entry_per_device``.
        warns: Warn of lists that may have an item per row, as they are about to reach the replicas in another way.
    Returns:
        The batch size all tensors, arrays, ``Rows`` and registered batches agree on; None when there is none to split.
    Raises:
        SplitError: two disagree, or one has no such dimension.
    """
    sizes: list[int] = []
    lists: list[Sequence[Any]] = []
    try:
        for _, value in named:
            _collect(value, dim, sizes, lists)
    except IndexError:  # no such dimension
        return _compare(named, dim, num_devices)
    if not sizes:
        return None
    num_rows = sizes[0] if sizes.count(sizes[0]) == len(sizes) else _compare(named, dim, num_devices)
    if warns and lists and num_devices > 1 and num_rows > 1:
        for items in lists:
            _look_at_list(items, named, num_rows, len(sizes), dim)
    return num_rows


def has_entry_per_device(leaf: Any, num_rows: int, num_devices: int, dim: int) -> bool:
    """Tell one number for each device, of which each replica gets its own, from rows of the batch.

    It is a whole number for each, all of them equal, as ``transformers`` passes ``num_items_in_batch``: integers of
    shape (devices,), (devices, 1) or the like, or floats of shape (devices, 1), which its newer versions make of them;
    beside a batch of another number of rows.
    """
    return num_rows != num_devices and _is_entry_per_device(leaf, num_devices, dim)


def _is_entry_per_device(leaf: Any, num_devices: int, dim: int) -> bool:
    if not tree.has_dims(leaf) or (isinstance(leaf, Tensor) and leaf.is_nested) or leaf.shape[dim] != num_devices:
        return False
    if not isinstance(leaf, Tensor):
        return bool(leaf.size == num_devices and leaf.dtype.kind in "iu" and (leaf == leaf.flat[0]).all())
    if num_devices == 1:  # it goes whole to the only one
        return leaf.numel() == 1
    is_float = leaf.is_floating_point()
    if leaf.numel() != num_devices or leaf.is_complex() or leaf.dtype is torch.bool or (is_float and leaf.ndim == 1):
        return False
    # Without waiting for a GPU where that isn't needed; the Feeder has looked at what it has spread.
    if isinstance(leaf, ShardedBatch) or (leaf.stride(dim) == 0 and not is_float):
        return True
    first = leaf.flatten()[0]
    return bool((leaf == (first.round() if is_float else first)).all())


def _collect(value: Any, dim: int, sizes: list[int], lists: list[Sequence[Any]]) -> None:
    """Collect the numbers of rows, and lists that may be lists of rows."""
    kind = type(value)
    if kind is Tensor and not value.is_nested:
        if value.ndim:
            sizes.append(value.shape[dim])
    elif kind is dict:
        for child in value.values():
            _collect(child, dim, sizes, lists)
    elif kind not in _WITHOUT_ROWS:
        if tree.has_dims(value) or batch_type(value) is not None:
            sizes.append(_count(value, dim))
        else:
            opened = tree.open_container(value)
            if (kind is list or kind is tuple) and len(value) > 1:
                lists.append(value)
            for child in () if opened is None else opened.children:
                _collect(child, dim, sizes, lists)


def _count(value: Any, dim: int) -> int:
    """Count the rows of what has some; an IndexError where ``dim`` has none."""
    known = batch_type(value)
    if known is None:
        size: int = value.shape[dim]
        return size
    if known.is_on_dim_0 and dim != 0:
        raise IndexError(dim)
    return known.count(value) or 0


def _compare(named: Named, dim: int, num_devices: int) -> int:
    """Return the number of rows that all but one entry per device agree on, or say which don't."""
    sized = [(path, leaf, _checked(path, leaf, dim)) for path, leaf in _sized(named)]
    rows = [found for found in sized if num_devices == 0 or not _is_entry_per_device(found[1], num_devices, dim)]
    first_path, first, num_rows = (rows or sized)[0]
    for path, leaf, size in rows or sized:
        if size != num_rows:
            shape = f" {tree.shape_of(leaf)}" if tree.has_dims(leaf) else ""
            raise SplitError(
                f"scatter: every tensor must have the same number of rows on dim {dim}, got {num_rows} in "
                f"{first_path} and {size} in {path}{shape}. Wrap an input that every replica needs whole in "
                f"everygpu.Replicated(...).{_advise((path, leaf, num_rows), (first_path, first, size))}"
            )
    return num_rows


def _advise(*found: tuple[str, Any, int]) -> str:
    """Say what else to do with two leaves that disagree, each beside the other's rows."""
    advice = " A list whose items are each a row goes into everygpu.Rows(...)." if _is_in_list(found[0][0]) else ""
    leaves = [leaf for _, leaf, _ in found]
    if all(isinstance(x, Tensor) and x.ndim == 1 and not x.is_floating_point() for x in leaves):
        advice += (
            " For nn.EmbeddingBag, pass everygpu.Rows with a tensor for each bag in place of offsets, or bags of one "
            "length in two dimensions, with padding_idx."
        )
    for path, leaf, rows in found:
        shape = tree.shape_of(leaf) if tree.has_dims(leaf) else ()
        if len(shape) > 2 and rows > 1 and rows in shape:
            advice += (
                f" If the rows of {path} are on dim {shape.index(rows)}, as in the state of an nn.LSTM, permute it "
                f"inside forward, or have all rows there, and pass dim={shape.index(rows)}."
            )
    return advice


def _is_in_list(path: str) -> bool:
    return re.search(r"\[\d+\]", re.sub(r"^(args|batch)\[", "", path)) is not None


def _sized(named: Named) -> Iterator[tuple[str, Any]]:
    for name, value in named:
        for path, leaf in tree.leaves(value, name, open_batch):
            if tree.has_dims(leaf) or batch_type(leaf) is not None:
                yield path, leaf


def _checked(path: str, leaf: Any, dim: int) -> int:
    try:
        return _count(leaf, dim)
    except IndexError as error:
        known = batch_type(leaf)
        if known is not None and known.is_on_dim_0 and dim != 0:
            raise SplitError(
                f"scatter: a {type(leaf).__qualname__} must have its rows on dim 0, got dim={dim} for {path}. "
                f"Pass a dict of its tensors."
            ) from error
        if known is not None or -leaf.ndim <= dim < leaf.ndim:
            raise
        raise SplitError(
            f"scatter: every tensor needs the batch on dim {dim}, got shape {tuple(leaf.shape)} in {path}. "
            f"Wrap it in everygpu.Replicated(...) if every replica needs it whole."
        ) from None


def _look_at_list(items: Sequence[Any], named: Named, num_rows: int, num_sized: int, dim: int) -> None:
    """Warn of a list whose items may be rows of the batch: it is taken as ``torch.nn.DataParallel`` takes it."""
    kind = type(items[0])
    if not issubclass(kind, _NUMBERS):
        holds_tensors = any(tree.has_dims(leaf) for _, leaf in tree.leaves(items[0], ""))
        if len(items) == num_rows and not holds_tensors:
            what = f"of {num_rows} items ({kind.__qualname__}), as many as the batch has rows, and goes whole to every"
            _warn_of_list(_path_of(items, named), f"{type(items).__qualname__} {what} replica")
    elif issubclass(kind, Tensor) and len(items) == num_sized and _differ_elsewhere(items, dim):
        shapes = ", ".join(str(tuple(x.shape)) for x in items[:3])
        what = f"of tensors of several shapes ({shapes}), each of which is cut along dim {dim}"
        _warn_of_list(_path_of(items, named), f"{type(items).__qualname__} {what}")


def _differ_elsewhere(items: Sequence[Any], dim: int) -> bool:
    """Tell whether tensors are of equal depth, and differ in another dimension than that of the rows."""
    if any(not isinstance(x, Tensor) or x.is_nested or x.ndim != items[0].ndim for x in items):
        return False
    at = dim % items[0].ndim
    return len({x.shape[:at] + x.shape[at + 1 :] for x in items}) > 1


def _path_of(wanted: Any, named: Named) -> str:
    """Find a container in the arguments."""
    pending = list(named)
    for path, value in pending:  # which grows meanwhile
        if value is wanted:
            return path
        opened = tree.open_container(value)
        if opened is not None:
            pending += [(path + a, child) for a, child in zip(opened.accessors, opened.children)]
    return ""


@functools.cache
def _warn_of_list(path: str, what: str) -> None:
    logger.warning(
        "scatter: %s is a %s. Wrap it in everygpu.Rows(...) if each item is a row, in everygpu.Replicated(...) if "
        "every replica needs all of them. This is said once.",
        path, what,
    )  # fmt: skip
