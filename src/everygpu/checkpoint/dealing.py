"""Rows of a loader's batches for each rank: the loader's batch is the batch of the whole run.

Rows are dealt contiguously, in the order of the ranks, and no two ranks' shares differ by more than one row. Where the
data set has indices, each rank reads its own rows only: the batches' lists of indices are cut, so workers, collate_fn
and pinning stay as they are.
"""

import functools
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from everygpu import tree
from everygpu.checkpoint.generators import generator_state, set_generator
from everygpu.checkpoint.loaders import has_index_lists, is_split_already
from everygpu.checkpoint.rng import plan_rng_restore, take_rng_states
from everygpu.devices.seed import derive_seed, seed_all
from everygpu.errors import OptionError, RankError
from everygpu.parallel.scatter.batch_types import batch_type, open_batch, slice_batch
from everygpu.parallel.scatter.row_count import find_rows
from everygpu.parallel.scatter.split import plan_split
from everygpu.ranks.first_batch import batch_digest
from everygpu.ranks.group import Group, join
from everygpu.ranks.lockstep import Lockstep

logger = logging.getLogger("everygpu")

Kind: TypeAlias = Literal["indexed", "whole", "sharded"]
"""A rank reads its own rows; it reads all and keeps its own; or its loader has only its own."""


class Dealing:
    """How one pass's batches are dealt to this rank.

    Args:
        group: The ranks.
        kind: What the loader gives.
    """

    def __init__(self, group: Group, kind: Kind) -> None:
        self.group, self.kind = group, kind
        self.lockstep = None if kind == "indexed" else Lockstep(group, must_match=kind == "whole")
        """None where all ranks know the number of batches from the sampler."""
        self._are_empty: deque[bool] = deque()
        self._first_indices: str | None = None

    def cut(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        """Cut the lists of indices that a batch sampler gives; one index stands for a batch without rows."""
        for whole in batches:
            indices = list(whole)
            if self._first_indices is None:
                self._first_indices = repr(indices)
            own = indices[self._share(len(indices))]
            self._are_empty.append(not own)
            yield own or indices[:1]

    def take(self, batch: Any, dim: int = 0) -> Any:
        """Return this rank's rows of what the loader has given; called for each batch, in order."""
        if self.kind == "indexed":
            return slice_rows(batch, slice(0, 0), dim) if self._are_empty.popleft() else batch
        own = batch
        if self.kind == "whole":
            num_rows = find_rows([("batch", batch)], dim)
            own = batch if num_rows is None else slice_rows(batch, self._share(num_rows), dim)
        if self.lockstep is not None:
            empty, digest = slice(0, 0), functools.partial(batch_digest, batch)
            self.lockstep.note(lambda: tree.map_leaves(_detached, slice_rows(own, empty, dim)), digest)
        return own

    def deal(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's rows of each batch, and batches without rows after its own end while others go on."""
        for batch in batches:
            own = self.take(batch)
            if self.lockstep is not None:
                self.lockstep.goes_on(True)
            yield own
        while self.lockstep is not None and self.lockstep.goes_on(False):
            yield self.lockstep.empty_batch()

    @contextmanager
    def same_order(self, loader: Any, generators: list[Any]) -> Iterator[None]:
        """Have a pass begin with rank 0's random states on all ranks, so that all draw the same order.

        The loader's own generators stay like rank 0's. The global ones of a rank where they differ, as they do after
        dropout on the CPU, are put back.

        Args:
            loader: What is iterated.
            generators: Those of its own.
        """
        states = take_rng_states(with_cuda=False)
        theirs, their_own = self.group.broadcast_object((states, [generator_state(g) for g in generators]))
        if len(their_own) != len(generators):
            raise RankError(
                f"ranks: every rank must give its loader as many generators as rank 0, "
                f"{len(their_own)}, got {len(generators)} on rank {self.group.rank}."
            )
        for generator, state in zip(generators, their_own):
            set_generator(generator, state)
        restore = plan_rng_restore(states)
        if theirs != states:
            plan_rng_restore(theirs)()
        try:
            with self._workers_by_rank(loader):
                yield
        finally:
            if theirs != states:
                restore()

    def check(self, sampler: Any) -> None:
        """Compare the first batch's indices and the number of batches, once the order is drawn.

        Args:
            sampler: Draws the order.
        Raises:
            RankError: ranks have drawn different orders, by which rows would be lost.
        """
        if self.kind != "indexed":
            return
        try:
            num_batches = len(sampler)
        except TypeError:  # a sampler without a length
            num_batches = None
        digest, self._first_indices = zlib.crc32(f"{num_batches} {self._first_indices}".encode()), ""
        if len(set(self.group.gather(digest))) > 1:
            raise RankError(
                "ranks: every rank must draw the same order from the same data, got different first batches or numbers "
                "of batches. Seed the sampler alike on all ranks, or pass sharded=True if each rank has data of its "
                "own. What one rank does alone, such as validating, iterates the DataLoader itself."
            )

    def _share(self, num_rows: int) -> slice:
        rows, rank = plan_split(num_rows, self.group.size, "even").rows, self.group.rank
        return slice(sum(rows[:rank]), sum(rows[: rank + 1]))

    @contextmanager
    def _workers_by_rank(self, loader: Any) -> Iterator[None]:
        """Have the workers that start now draw other numbers than those of other ranks, and keep the batches' order."""
        if not isinstance(loader, DataLoader):
            yield
            return
        own = vars(loader)
        changed: dict[str, Any] = {"in_order": True}
        if self.kind != "whole" and self.group.rank:
            changed["worker_init_fn"] = _WorkerOfRank(self.group.rank, loader.worker_init_fn)
        before = {name: own[name] for name in changed}
        own.update(changed)
        try:
            yield
        finally:
            own.update(before)


@dataclass(frozen=True, slots=True)
class _WorkerOfRank:
    """A worker_init_fn; workers of a rank draw other numbers than those of other ranks, which have the same seeds."""

    rank: int
    then: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        seed_all(derive_seed(torch.initial_seed(), self.rank))
        if self.then is not None:
            self.then(worker)


class DealtSampler:
    """A batch sampler whose lists of indices are cut to this rank's.

    Args:
        sampler: That of the whole run.
    """

    def __init__(self, sampler: Any) -> None:
        self.dealing: Dealing | None = None
        """Of the pass that begins next."""
        self._sampler = sampler

    @property
    def whole_sampler(self) -> Any:
        """This one, from its first batch on."""
        twin = DealtSampler(getattr(self._sampler, "whole_sampler", self._sampler))
        twin.dealing = self.dealing
        return twin

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._sampler)
        return batches if self.dealing is None or self.dealing.kind != "indexed" else self.dealing.cut(batches)


class Dealer:
    """Deals the batches of one loader; says once in a process what that means.

    Args:
        loader: Any iterable of batches.
        sharded: Whether each rank's loader gives that rank's own rows.
        caller: Whose messages they are.
    Raises:
        OptionError: ``sharded`` is neither True nor False.
    """

    def __init__(self, loader: Any, sharded: bool, caller: str) -> None:
        if not isinstance(sharded, bool):
            raise OptionError(f"{caller}: sharded must be True or False, got {sharded!r}. Leave it out for False.")
        self._caller = caller
        is_split = is_split_already(loader)
        self.kind: Kind = "sharded" if sharded or is_split else "indexed" if has_index_lists(loader) else "whole"
        self._advice = "" if sharded else _IS_SPLIT if is_split else _IS_WHOLE if self.kind == "whole" else ""

    def begin_pass(self) -> Dealing | None:
        """Return how the next pass is dealt; None without ranks. All ranks call it at the same place."""
        group = join()
        if group is None:
            return None
        if self._advice and group.rank == 0:
            _say_once(self._caller, self._advice)
        return Dealing(group, self.kind)


_IS_SPLIT = "the DataLoader has a DistributedSampler: each rank's batches are taken as its own, as by sharded=True."
_IS_WHOLE = (
    "every rank reads all of this loader and keeps its own rows of each batch, since it has no indices to deal. With "
    "a data set that gives each rank its own part, sharded=True avoids that."
)


@functools.cache
def _say_once(caller: str, advice: str) -> None:
    logger.warning("%s: %s", caller, advice)


def slice_rows(batch: Any, rows: slice, dim: int) -> Any:
    """Slice every tensor and array of a batch along a dimension, and ``Rows`` and the like; the rest stays as it is."""

    def cut(leaf: Any) -> Any:
        kind = batch_type(leaf)
        if kind is not None:
            return slice_batch(leaf, kind, rows)
        return leaf[(slice(None),) * (dim % leaf.ndim) + (rows,)] if tree.has_dims(leaf) else leaf

    return tree.map_leaves(cut, batch, open_batch)


def _detached(leaf: Any) -> Any:
    """Copy what has no rows, so that it doesn't keep the batch it was cut from."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf.copy() if tree.is_array(leaf) else leaf
