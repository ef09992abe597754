"""How many rows a batch has, and what in it has them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everygpu import tree
from everygpu.errors import SplitError
from everygpu.parallel.scatter.batch_types import batch_type, open_batch
from everygpu.parallel.scatter.lists import warn_of_entries, warn_of_lists
from everygpu.torch_private.modes import num_dispatch_modes

_WITHOUT_ROWS = frozenset({int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size})

Named = Sequence[tuple[str, Any]]
"""Arguments with their names, such as ``("args[0]", x)``."""


def name_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Name the arguments of a call."""
    return [(f"args[{i}]", a) for i, a in enumerate(args)] + [(f'kwargs["{k}"]', v) for k, v in kwargs.items()]


def find_rows(named: Named, dim: int, num_devices: int = 0, *, warns: bool = False) -> int | None:
    """Read the batch size off the tensors of a call, and off what else has rows.

    A tensor or array with one entry per device, of shape (devices,), (devices, 1) or the like, isn't counted where the
    others agree on another number: ``has_entry_per_device`` tells it from rows.

    Args:
        named: Arguments with their names; containers are searched.
        dim: The dimension along which tensors are split.
        num_devices: Devices that the rows are for; 0 if that isn't known.
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
    num_rows: int = sizes[0]
    if sizes.count(num_rows) != len(sizes):
        num_rows = _compare(named, dim, num_devices, warns=warns)
    if warns and lists and num_devices > 1 and num_rows > 1:
        warn_of_lists(named, lists, num_rows, len(sizes), dim)
    return num_rows


def has_entry_per_device(leaf: Any, num_rows: int, num_devices: int, dim: int) -> bool:
    """Tell a tensor with one number for each device from one with rows of the batch.

    Args:
        leaf: A tensor or array that has dimensions.
        num_rows: Rows of the batch.
        num_devices: All of them, whether they get rows or not.
        dim: The dimension of the rows.
    """
    return num_rows != num_devices and _num_entries(leaf, dim) == num_devices


def _num_entries(leaf: Any, dim: int) -> int | None:
    """Count the numbers in a tensor whose other dimensions have a size of 1; None for another, or what is none."""
    if not tree.has_dims(leaf) or (isinstance(leaf, Tensor) and leaf.is_nested):
        return None
    size: int = leaf.shape[dim]
    return size if size == (leaf.numel() if isinstance(leaf, Tensor) else leaf.size) else None


def _collect(value: Any, dim: int, sizes: list[int], lists: list[Sequence[Any]]) -> None:
    """Collect the numbers of rows, and lists that may be lists of rows; as ``_sized``, but without names."""
    kind = type(value)
    if kind is Tensor and not value.is_nested:
        if value.ndim:
            sizes.append(value.shape[dim])
    elif kind is dict:
        for child in value.values():
            _collect(child, dim, sizes, lists)
    elif kind not in _WITHOUT_ROWS:
        known = batch_type(value)
        if known is not None or tree.has_dims(value):
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
        if _is_fake(value):
            raise IndexError
        size: int = value.shape[dim]
        return size
    if known.is_on_dim_0 and dim != 0:
        raise IndexError
    return known.count(value) or 0


def _compare(named: Named, dim: int, num_devices: int, *, warns: bool = False) -> int:
    """Return the number of rows that all but one entry per device agree on, or say which don't."""
    sized = [(path, leaf, _checked(path, leaf, dim)) for path, leaf in _sized(named)]
    rows = [found for found in sized if num_devices == 0 or _num_entries(found[1], dim) != num_devices] or sized
    first_path, first, num_rows = rows[0]
    for path, leaf, size in rows:
        if size != num_rows:
            shape = f" {tree.shape_of(leaf)}" if tree.has_dims(leaf) else ""
            of_rows = " A list whose items are each a row goes into everygpu.Rows(...)." if _is_in_list(path) else ""
            elsewhere = _advise_other_dim(((path, leaf, num_rows), (first_path, first, size)), dim, num_devices)
            raise SplitError(
                f"scatter: every tensor must have the same number of rows on dim {dim}, got {num_rows} in "
                f"{first_path} and {size} in {path}{shape}. Wrap an input that every replica "
                f"needs whole in everygpu.Replicated(...).{of_rows}{elsewhere}"
            )
    for path, leaf, size in sized if warns and num_devices > 1 else ():
        if size != num_rows and leaf.ndim == 1:  # (devices, 1) is no shape of sizes or weights
            warn_of_entries(path, size)
    return num_rows


def _advise_other_dim(tensors: Sequence[tuple[str, Any, int]], dim: int, num_devices: int) -> str:
    """Say what to do with the first tensor whose rows seem to be on another dimension; with a space before it.

    There, it has as many entries as the other tensor has rows, or as many as the rows of each of its replicas: so a
    state comes back from replicas whose outputs were joined along ``dim``.
    """
    for path, leaf, rows in tensors if dim >= 0 else ():
        is_plain = tree.has_dims(leaf) and not (isinstance(leaf, Tensor) and leaf.is_nested)
        for at, size in enumerate(leaf.shape if is_plain and leaf.ndim > 2 else ()):
            was_joined = size * num_devices == rows and leaf.shape[dim] % num_devices == 0
            if at != dim and rows > 1 and (size == rows or was_joined):
                return (
                    f" If the rows of {path} are on dim {at}, as in the state of an nn.LSTM, permute it inside "
                    f"forward, or have the rows of all inputs and outputs on dim {at}, and pass dim={at}."
                )
    return ""


def _sized(named: Named) -> Iterator[tuple[str, Any]]:
    for name, value in named:
        for path, leaf in tree.leaves(value, name, open_batch):
            if tree.has_dims(leaf) or batch_type(leaf) is not None:
                yield path, leaf


def _is_in_list(path: str) -> bool:
    return re.search(r"\[\d+\]", re.sub(r"^(args|batch)\[", "", path)) is not None


def _checked(path: str, leaf: Any, dim: int) -> int:
    try:
        return _count(leaf, dim)
    except IndexError as error:
        known, is_tensor = batch_type(leaf), tree.has_dims(leaf)
        if is_tensor and _is_fake(leaf):
            raise SplitError(
                f"scatter: tensors must have values, got a FakeTensor of shape {tuple(leaf.shape)} in {path}. "
                f"Call the module itself under its FakeTensorMode."
            ) from error
        if known is not None and known.is_on_dim_0 and dim != 0:
            raise SplitError(
                f"scatter: a {type(leaf).__qualname__} must have its rows on dim 0, got dim={dim} for {path}. "
                f"Pass a dict of its tensors."
            ) from error
        if known is not None or not is_tensor or -leaf.ndim <= dim < leaf.ndim:
            raise
        raise SplitError(
            f"scatter: every tensor needs the batch on dim {dim}, got shape {tuple(leaf.shape)} in {path}. "
            f"Wrap it in everygpu.Replicated(...) if every replica needs it whole."
        ) from None


def _is_fake(value: Any) -> bool:
    return type(value).__name__ == "FakeTensor" and num_dispatch_modes() == 0
