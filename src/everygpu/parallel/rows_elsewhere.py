"""Outputs whose rows may be on another dimension than the one along which replicas' outputs are joined."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from everygpu import tree

logger = logging.getLogger("everygpu")


def find_rows_elsewhere(shapes: Sequence[tuple[int, ...]], num_rows: Sequence[int] | None, dim: int) -> int | None:
    """Return the other dimension whose size is the number of rows in each shape; None where there is none.

    Args:
        shapes: One per replica, of as many dimensions.
        num_rows: Rows of each replica; None where they are unknown.
        dim: The dimension where the rows should be.
    """
    if not num_rows or len(num_rows) != len(shapes) or max(num_rows) < 2:
        return None
    ndim = len(shapes[0])
    others = (d for d in range(ndim) if d != dim % ndim)
    return next((d for d in others if all(s[d] == n for s, n in zip(shapes, num_rows))), None)


def may_lack_rows(tensors: Sequence[Tensor], num_rows: Sequence[int], dim: int) -> bool:
    """Tell whether tensors may have their rows elsewhere, as the state of an ``nn.LSTM`` with ``batch_first`` has.

    They are alike, and what is on ``dim`` are neither the rows nor some entries for each. Tensors of two dimensions
    agree with the rows by chance more often.
    """
    rows, shape = num_rows[0], tensors[0].shape
    if len(shape) < 3 or shape[dim] % rows == 0 or any(t.shape != shape for t in tensors):
        return False
    return find_rows_elsewhere([tuple(t.shape) for t in tensors], num_rows, dim) is not None


def warn_of_rows_elsewhere(paths: Sequence[str], output: Any, num_rows: Sequence[int], dim: int) -> None:
    """Warn once of outputs that ``may_lack_rows``, if another output of the replica has its rows where they should be.

    Args:
        paths: Of such outputs.
        output: What the first replica returned.
        num_rows: Rows of each replica.
        dim: The dimension along which outputs are joined.
    """
    said, all_paths = said_paths(), " and ".join(paths)
    if all_paths in said:
        return
    found = {path: x for path, x in tree.leaves(output, "out") if isinstance(x, Tensor) and not x.is_nested}
    if any(-x.ndim <= dim < x.ndim and x.shape[dim] == num_rows[0] for x in found.values()):
        said.add(all_paths)
        _say(all_paths, find_rows_elsewhere([tuple(found[paths[0]].shape)], num_rows[:1], dim), dim)


@functools.cache
def said_paths() -> set[str]:
    """Return the outputs of which this process has warned."""
    return set()


def _say(paths: str, found: int | None, dim: int) -> None:
    logger.warning(
        "gather: %s: as many entries on dim %d as each replica has rows, but joined along dim %d, where other outputs "
        "have their rows. If the rows are on dim %d, as in the state of an nn.LSTM, permute them to dim %d inside "
        "forward, or leave this out of what it returns. This is said once.",
        paths, found, dim, found, dim,
    )  # fmt: skip
