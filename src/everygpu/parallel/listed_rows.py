"""Lists that replicas return with an item per row, as detections are: told from lists with an item per output."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from everygpu import tree

logger = logging.getLogger("everygpu")


def are_listed_rows(
    lists: Sequence[Any], num_rows: Sequence[int], dim: int, path: str, is_equal: Callable[[Any, Any], bool]
) -> bool:
    """Tell whether lists have an item per row, so that they are joined end to end and not item by item.

    ``torch.nn.DataParallel`` joins item by item. Dicts and other objects aren't, where their number is that of the rows
    in every replica, and their tensors are none of the batch's rows, or strings differ. A warning says once what was
    done.

    Args:
        lists: One per replica, or anything else.
        num_rows: Rows of each replica.
        dim: The dimension of the rows.
        path: Of the lists in the output.
        is_equal: Compares lists without tensors.
    """
    if any(type(items) is not list for items in lists) or [len(items) for items in lists] != list(num_rows):
        return False
    pairs = [(item, rows) for items, rows in zip(lists, num_rows) for item in items]
    if not pairs or any(type(item) in (int, float, complex, bool, type(None)) for item, _ in pairs):
        return False
    tensors = [(leaf, rows) for item, rows in pairs for _, leaf in tree.leaves(item, "") if _is_tensor(leaf)]
    are_others = any(leaf.ndim > 0 and _size(leaf) != 1 and not _has_rows(leaf, rows, dim) for leaf, rows in tensors)
    if any(isinstance(item, (Tensor, list, tuple)) or tree.is_array(item) for item, _ in pairs):
        if are_others and len(set(num_rows)) == 1:
            _say(path, "joined item by item")
        return False
    if len(set(num_rows)) > 1 or (not tensors and not all(is_equal(items, lists[0]) for items in lists[1:])):
        return True
    _say(path, "joined end to end" if are_others else "joined item by item")
    return are_others


def _is_tensor(leaf: Any) -> bool:
    return (isinstance(leaf, Tensor) and not leaf.is_nested) or tree.is_array(leaf)


def _size(leaf: Any) -> int:
    size: int = leaf.numel() if isinstance(leaf, Tensor) else leaf.size
    return size


def _has_rows(leaf: Any, rows: int, dim: int) -> bool:
    return -leaf.ndim <= dim < leaf.ndim and bool(leaf.shape[dim] == rows)


@functools.cache
def _say(path: str, what: str) -> None:
    logger.warning(
        "gather: each replica returned as many items in the list %s as it has rows: they are %s. Return "
        "everygpu.Rows(...) if each item is a row, a tuple if each is an output of its own. This is said once.",
        path, what,
    )  # fmt: skip
