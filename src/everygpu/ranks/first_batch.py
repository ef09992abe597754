"""A look at the first batch of a run: ranks that read a loader by themselves train on the same rows, unnoticed."""

import logging
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from everygpu import tree

if TYPE_CHECKING:
    from everygpu.ranks.group import Group

logger = logging.getLogger("everygpu")

_MOST_VALUES = 4096
"""Of each tensor, as many are compared."""


class FirstBatch:
    """Warns, once, where all ranks have the same rows in their first batch."""

    def __init__(self) -> None:
        self._is_known = False

    def compare(self, group: "Group", batch: Any) -> None:
        """Compare the ranks' first batches; all ranks call it with theirs, again for later ones, at no cost."""
        if self._is_known or not torch.is_grad_enabled():
            return
        found = group.gather(batch_digest(batch))
        self._is_known = len(found) > 1  # not where each rank is by itself
        if self._is_known and len(set(found)) == 1 and found[0]:
            logger.warning(
                "ranks: all %d ranks got the same rows in their first batch: each step does the work of %d for the "
                "result of one. Deal the batch to the ranks by everygpu.Feeder(loader, model), "
                "or give the loader a DistributedSampler.",
                len(found),
                len(found),
            )


def batch_digest(batch: Any) -> int:
    """Tell batches apart by the first values of each tensor; 0 where there are none."""
    found = 0
    for path, x in tree.leaves(batch, ""):
        if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and x.numel():
            found = zlib.crc32(repr((path, x.shape, x.flatten()[:_MOST_VALUES].tolist())).encode(), found)
    return found
