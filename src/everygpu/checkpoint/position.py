"""Where a run stands in its data, so that a resumed run sees the same samples in the same order.

DataLoader's workers fetch ahead, so the sampler is further than the training; and the order of an epoch
depends on random states from before its first batch. Hence batches are counted where they are handed out,
and the random states from the epoch's beginning are kept. To resume, the epoch's order is drawn again from
these, and the indices of the batches that were used are skipped without fetching anything.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from everygpu.checkpoint.rng import plan_rng_restore, take_rng_states
from everygpu.errors import CheckpointMismatchError, OptionError

_LOG = logging.getLogger("everygpu")


class ResumableLoader:
    """Wraps a DataLoader; saved and loaded with a checkpoint, it goes on after the last batch it gave.

    ::

        data = everygpu.ResumableLoader(DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4))
        for epoch in range(data.epoch, num_epochs):
            for x, y in data:
                ...

    The order of the samples stays the same when the number of workers or replicas changes. What workers draw
    at random, as augmentations, does not: their random states are their own. An IterableDataset can't be
    skipped through, so the batches that were used are fetched again and dropped.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Wrap a loader; its sampler, workers and all else stay as they are.

        Args:
            loader: With or without shuffling, any sampler or batch sampler whose order follows from random
                states at the epoch's beginning: torch's, NumPy's, Python's, or a generator of its own.
        Raises:
            OptionError: it is no DataLoader, or one that keeps its position itself.
        """
        if not isinstance(loader, DataLoader) or hasattr(loader, "load_state_dict"):
            raise OptionError(
                f"ResumableLoader: loader must be a torch.utils.data.DataLoader, got {type(loader).__qualname__}. "
                f"A loader with a state_dict of its own, as torchdata's, is saved and loaded as it is."
            )
        self.loader = loader
        self.epoch = 0
        """How many passes over the data are complete."""
        self._num_batches = 0
        self._is_resumed = False
        self._order = _Order(_index_sampler(loader), _generators(loader))
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        self._ordered = loader if self._is_iterable else _with_index_sampler(loader, self._order)

    def __len__(self) -> int:
        """Count the batches of a whole pass."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Give the batches of a pass; of the one that was resumed, those that are left.

        A batch counts as used when it is handed out. A pass that is left early counts as complete once the
        next one begins.
        """
        for batch in self._begin():
            self._num_batches += 1
            yield batch
        self.epoch, self._num_batches = self.epoch + 1, 0

    def state_dict(self, num_pending: int = 0) -> dict[str, Any]:
        """Return the position.

        Args:
            num_pending: How many of the batches handed out are not used yet, where somebody fetches ahead.
        """
        num_batches = max(0, self._num_batches - num_pending)
        return {
            "epoch": self.epoch,
            "num_batches": num_batches,
            "length": _length(self.loader),
            # Between two passes, generators of the loader's own are where the next pass begins.
            "start": self._order.start if num_batches else {"generators": self._order.generator_states()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; the next pass begins there.

        Raises:
            CheckpointMismatchError: a pass has another number of batches than the one that was saved.
        """
        if state["length"] != _length(self.loader):
            raise CheckpointMismatchError(
                f"load: the data must have as many batches as when it was saved, {state['length']}, got "
                f"{_length(self.loader)}. Use the same dataset and batch size, or leave the position out."
            )
        self.epoch, self._num_batches = state["epoch"], state["num_batches"]
        self._order.start, self._is_resumed = state["start"], True
        if not self._num_batches:
            self._order.set_generators()

    def _begin(self) -> Iterator[Any]:
        resumed, self._is_resumed = self._is_resumed, False
        if not resumed and self._num_batches:
            self.epoch, self._num_batches = self.epoch + 1, 0
        if self._is_iterable:
            return self._begin_iterable()
        self._order.num_skipped = self._num_batches
        # A new iterator draws a seed for its workers: an interrupted pass had done so before it was saved.
        keeps_workers = self.loader.persistent_workers and self.epoch > 0
        if resumed and (self._num_batches or keeps_workers):
            with _random_states_kept():
                return iter(self._ordered)
        return iter(self._ordered)

    def _begin_iterable(self) -> Iterator[Any]:
        if not self._num_batches:
            self._order.remember()
            return iter(self._ordered)
        _LOG.info("ResumableLoader: %d batches of an IterableDataset are fetched again.", self._num_batches)
        with _random_states_kept():
            self._order.return_to_start()
            batches = iter(self._ordered)
            for _ in islice(batches, self._num_batches):
                pass
        return batches


class _Order:
    """A sampler that knows the random states its pass began with, and can begin the same pass again."""

    def __init__(self, sampler: Any, generators: list[torch.Generator]) -> None:
        self.start: Any = None
        self.num_skipped = 0
        self._sampler, self._generators = sampler, generators

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        # Runs in the main process, when the first index is asked for.
        yield from self._repeat() if self.num_skipped else self._begin()

    def remember(self) -> None:
        """Keep the random states of this moment as those of the pass's beginning."""
        self.start = {"global": take_rng_states(with_cuda=False), "generators": self.generator_states()}

    def return_to_start(self) -> None:
        """Set the random states to those of the pass's beginning."""
        plan_rng_restore(self.start["global"])()
        self.set_generators()

    def generator_states(self) -> list[bytes]:
        """Return the present states of the loader's own generators."""
        return [bytes(generator.get_state().tolist()) for generator in self._generators]

    def set_generators(self) -> None:
        """Set the loader's own generators to the pass's beginning."""
        for generator, state in zip(self._generators, self.start["generators"], strict=True):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def _begin(self) -> Iterator[Any]:
        self.remember()
        indices: Iterator[Any] = iter(self._sampler)
        return indices

    def _repeat(self) -> Iterator[Any]:
        with _random_states_kept():
            self.return_to_start()
            indices: Iterator[Any] = iter(self._sampler)
            for _ in islice(indices, self.num_skipped):
                pass
        return indices


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Put the global random states back when the block ends; generators of the loader's own go on."""
    restore: Callable[[], None] = plan_rng_restore(take_rng_states(with_cuda=False))
    try:
        yield
    finally:
        restore()


def _index_sampler(loader: DataLoader[Any]) -> Any:
    """Return what the loader asks for indices: for each batch, or for each sample where it makes no batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _with_index_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Copy a loader, of whatever subclass, with another sampler in place of its own."""
    twin = copy.copy(loader)
    # DataLoader refuses to set these after its constructor.
    twin.__dict__["sampler" if loader.batch_sampler is None else "batch_sampler"] = sampler
    twin.__dict__["_iterator"] = None
    return twin


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Find the generators that the order may come from, each once."""
    holders = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(cast(Sized, loader))
    except TypeError:  # an IterableDataset without a length
        return None
