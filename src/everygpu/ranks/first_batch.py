"""A look at the first batch of a run: ranks that read a loader by themselves train on the same rows, unnoticed."""

import hashlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from everygpu import tree

if TYPE_CHECKING:
    from everygpu.ranks.group import Group

logger = logging.getLogger("everygpu")

_MOST_NUMBERS = 4096
"""Of each tensor, as many are compared."""


class FirstBatch:
    """Warns, once, where all ranks have the same rows in their first batch."""

    def __init__(self) -> None:
        self._is_known = False

    def compare(self, group: "Group", batch: Any) -> None:
        """Compare the ranks' first batches; all ranks call it with theirs, again for later ones, at no cost."""
        if self._is_known or not torch.is_grad_enabled():
            return
        self._is_known = True
        found = group.gather(_digest(batch))
        if len(found) > 1 and len(set(found)) == 1 and found[0]:
            logger.warning(
                "ranks: all %d ranks got the same rows in their first batch: each step does the work of %d for the "
                "result of one. Deal the batch to the ranks by everygpu.Feeder(loader, model) or "
                "everygpu.ResumableLoader(loader), or give the loader a DistributedSampler.",
                len(found),
                len(found),
            )


def _digest(batch: Any) -> str:
    """Return a digest of a batch's tensors; nothing where there is no row."""
    digest, is_empty = hashlib.sha256(), True
    for path, leaf in tree.leaves(batch, ""):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested and leaf.numel():
            some = leaf.detach().flatten()[:_MOST_NUMBERS].tolist()
            digest.update(f"{path} {tuple(leaf.shape)} {some}".encode())
            is_empty = False
    return "" if is_empty else digest.hexdigest()
