"""Outputs whose rows may be on another dimension than the one along which replicas' outputs are joined."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from everygpu import tree

logger = logging.getLogger("everygpu")


def find_rows_elsewhere(shapes: Sequence[tuple[int, ...]], num_rows: Sequence[int] | None, dim: int) -> int | None:
    """Return the other dimension whose size is the number of rows in each shape; None where there is none, or the rows
    are where they should be.

    Args:
        shapes: One per replica, of as many dimensions.
        num_rows: Rows of each replica; None where they are unknown.
        dim: The dimension where the rows should be.
    """
    if not num_rows or len(num_rows) != len(shapes) or max(num_rows) < 2:
        return None
    if all(shape[dim] == n for shape, n in zip(shapes, num_rows)):
        return None
    ndim = len(shapes[0])
    others = (d for d in range(ndim) if d != dim % ndim)
    return next((d for d in others if all(s[d] == n for s, n in zip(shapes, num_rows))), None)


def find_state_rows(tensors: Sequence[Tensor], num_rows: Sequence[int], dim: int) -> int | None:
    """Return the dimension of the rows of what may have them elsewhere, as the state of an ``nn.LSTM`` may; else None.

    Its tensors are alike, and what is on ``dim`` are neither the rows nor some entries for each. Those of two
    dimensions agree with the rows by chance more often.
    """
    rows, shape = num_rows[0], tensors[0].shape
    if rows < 2 or len(shape) < 3 or shape[dim] % rows == 0 or any(t.shape != shape for t in tensors):
        return None
    return find_rows_elsewhere([tuple(shape)] * len(tensors), num_rows, dim)


def warn_of_rows_elsewhere(found: Sequence[tuple[str, int]], output: Any, num_rows: int, dim: int) -> None:
    """Warn once of outputs with their rows elsewhere, if another output has its own where they should be.

    Args:
        found: Paths of such outputs, and the dimensions of their rows.
        output: What the first replica returned.
        num_rows: Rows of that replica.
        dim: The dimension along which outputs are joined.
    """
    others = (x for _, x in tree.leaves(output, "out") if isinstance(x, Tensor) and not x.is_nested)
    if any(-x.ndim <= dim < x.ndim and x.shape[dim] == num_rows for x in others):
        _say(" and ".join(path for path, _ in found), found[0][1], dim)


@functools.cache
def _say(paths: str, found: int, dim: int) -> None:
    logger.warning(
        "gather: %s: as many entries on dim %d as each replica has rows, but joined along dim %d, where other outputs "
        "have their rows. If the rows are on dim %d, as in the state of an nn.LSTM, permute them to dim %d inside "
        "forward, or leave this out of what it returns. This is said once.",
        paths, found, dim, found, dim,
    )  # fmt: skip
