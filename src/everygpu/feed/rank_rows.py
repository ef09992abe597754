"""Rows of a loader's batches for each rank: the loader's batch is the batch of the whole run.

Rows are distributed in rank order, and shares differ by one row at most. If the dataset has indices, each rank reads
its own rows only: the batches' lists of indices are cut, so workers, collate_fn and pinning stay the same.
"""

import functools
import logging
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from everygpu import tree
from everygpu.errors import RankError
from everygpu.parallel.scatter.batch_types import batch_type, open_batch, slice_batch
from everygpu.parallel.scatter.row_count import find_rows
from everygpu.parallel.scatter.split import plan_split
from everygpu.ranks.group import Group, batch_digest
from everygpu.ranks.lockstep import Lockstep

logger = logging.getLogger("everygpu")

Kind: TypeAlias = Literal["indexed", "whole", "sharded"]
"""A rank reads only its own rows; it reads all rows and keeps its own; or its loader has only its own."""


def kind_of(loader: Any, sharded: bool) -> Kind:
    """Return how a loader's batches are distributed to ranks."""
    is_split = any(isinstance(s, DistributedSampler) and s.num_replicas > 1 for s in samplers_of(loader))
    if sharded or (is_split and isinstance(loader, DataLoader)):
        return "sharded"
    if not is_data_loader(loader) or isinstance(loader.dataset, IterableDataset):
        return "whole"
    return "indexed" if loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler) else "whole"


def is_data_loader(loader: Any) -> bool:
    """Whether a loader is torch's, unlike Accelerate's, which pretend to be, and keeps no position itself."""
    return issubclass(type(loader), DataLoader) and not hasattr(loader, "load_state_dict")


def length_of(data: Any) -> int | None:
    """Return the length; None if there is no ``len``, as for an IterableDataset."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def samplers_of(loader: Any) -> list[Any]:
    """List a DataLoader's samplers; None for those that it has not."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


@functools.cache
def say_once(kind: Kind) -> None:
    """Log a way of distributing rows that the user didn't ask for."""
    if kind == "sharded":
        logger.warning("Feeder: with a DistributedSampler each rank's batches are its own, as by sharded=True.")
    elif kind == "whole":
        logger.warning(
            "Feeder: every rank reads all of this loader and keeps its own rows of each batch, since it has no indices "
            "to distribute. With a dataset that gives each rank its own part, sharded=True avoids that."
        )


class RankRows:
    """How one epoch's batches are distributed to this rank."""

    def __init__(self, group: Group, kind: Kind) -> None:
        self.group, self.kind = group, kind
        self.lockstep = None if kind == "indexed" else Lockstep(group, must_match=kind == "whole")
        """None where all ranks know the number of batches from the sampler."""
        self.are_empty: deque[bool] = deque()
        """For each batch that was cut but not taken yet, whether this rank has no rows in it."""

    def cut(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        """Cut the lists of indices that a batch sampler gives; a batch without rows keeps one index."""
        for whole in batches:
            indices = list(whole)
            own = indices[self._share(len(indices))]
            self.are_empty.append(not own)
            yield own or indices[:1]

    def take(self, batch: Any, dim: int = 0) -> Any:
        """Return this rank's rows of the loader's batch; called for each batch, in order."""
        if self.kind == "indexed":
            return slice_rows(batch, slice(0, 0), dim) if self.are_empty.popleft() else batch
        own = batch
        if self.kind == "whole":
            num_rows = find_rows([("batch", batch)], dim)
            own = batch if num_rows is None else slice_rows(batch, self._share(num_rows), dim)
        if self.lockstep is not None:
            empty, digest = slice(0, 0), functools.partial(batch_digest, batch)
            self.lockstep.note(lambda: tree.map_leaves(_detached, slice_rows(own, empty, dim)), digest)
        return own

    def check(self, sampler: Any, first: list[Any]) -> None:
        """Compare the first batch's indices and the number of batches, once the order is drawn: else rows are lost."""
        if self.kind != "indexed":
            return
        digest = zlib.crc32(f"{length_of(sampler)} {[list(batch) for batch in first]}".encode())
        if len(set(self.group.gather(digest))) > 1:
            raise RankError(
                "Feeder: ranks must draw the same order, got other first batches or numbers of batches. Seed samplers "
                "equally, pass sharded=True if each rank has its own data, and iterate the loader on all ranks."
            )

    def _share(self, num_rows: int) -> slice:
        rows, rank = plan_split(num_rows, self.group.size, "even").rows, self.group.rank
        return slice(sum(rows[:rank]), sum(rows[: rank + 1]))


def slice_rows(batch: Any, rows: slice, dim: int) -> Any:
    """Slice every tensor and array of a batch along a dimension, and ``Rows`` and the like; the rest is unchanged."""

    def cut(leaf: Any) -> Any:
        kind = batch_type(leaf)
        if kind is not None:
            return slice_batch(leaf, kind, rows)
        return leaf[(slice(None),) * (dim % leaf.ndim) + (rows,)] if tree.has_dims(leaf) else leaf

    return tree.map_leaves(cut, batch, open_batch)


def _detached(leaf: Any) -> Any:
    """Copy what has no rows, so that it doesn't keep the batch it was cut from."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf.copy() if tree.is_array(leaf) else leaf
