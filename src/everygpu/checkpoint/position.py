"""A run's position in its data, so that a resumed run sees the same samples in the same order.

DataLoader's workers and a Feeder's thread fetch ahead, so the sampler is further than the training; and the order
of an epoch depends on random states from before its first batch. Hence batches are counted where the training loop
gets them, and the random states from the epoch's beginning are kept. To resume, the epoch's order is drawn again
from these, and the indices of the batches that were used are skipped without fetching anything.
"""

import logging
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from everygpu.checkpoint.dealing import Dealer, Dealing, DealtSampler
from everygpu.checkpoint.generators import generator_state, order_generators, set_generator
from everygpu.checkpoint.loaders import (
    index_sampler,
    is_in_order,
    iterate,
    with_index_sampler,
    with_order_drawn,
)
from everygpu.checkpoint.matching import check_drawn_again, check_position, describe_data, digest_of, frozen
from everygpu.checkpoint.rng import plan_rng_restore, rng_states_kept, take_rng_states
from everygpu.errors import OptionError

logger = logging.getLogger("everygpu")


class Progress:
    """How far the training is in one pass; told by whatever hands it the batches.

    Each pass has one of its own, so a pass that goes on beside a later one doesn't change where the later one stands.
    """

    __slots__ = ("dealing", "digest", "drawn", "epoch", "last", "num_batches", "start")

    def __init__(self, epoch: int = 0, num_batches: int = 0, start: Any = None, digest: int | None = None) -> None:
        self.epoch = epoch
        self.num_batches = num_batches
        self.start = start
        """Random states that the order is drawn from; None before and after the pass."""
        self.dealing: Dealing | None = None
        """How the batches are dealt to ranks; None where there is one process."""
        self.digest = digest
        """Of the indices of the last batch that was used before the pass was resumed."""
        self.drawn: deque[Any] = deque()
        """Indices of the batches that are drawn and not used yet."""
        self.last: Any = None
        """Indices of the batch that was used last; None before the first one."""

    def count(self) -> None:
        """Count a batch as used."""
        self.num_batches += 1
        if self.drawn:
            self.last = self.drawn.popleft()

    def finish(self) -> None:
        """Count the pass as complete."""
        self.epoch, self.num_batches, self.start = self.epoch + 1, 0, None
        self.digest = self.last = None


class ResumableLoader:
    """Wraps a DataLoader; saved and loaded with a checkpoint, it goes on after the last batch it gave.

    ::

        data = everygpu.ResumableLoader(DataLoader(dataset, batch_size=64, shuffle=True))
        for epoch in range(data.epoch, num_epochs):
            for x, y in data:
                train(x, y)
                checkpoints.save(step, model=model, optimizer=optimizer, data=data)

    The order of the samples stays the same when the number of workers or replicas changes, not when
    ``persistent_workers`` does, nor what workers draw at random, as augmentations: their random states are their own.
    An IterableDataset can't be skipped through, so the batches that were used are fetched again and dropped.

    A `Feeder` over it fetches ahead and says which batches it has handed out: only these count. The position is
    that of the pass that was begun last.

    Under several ranks the DataLoader's batch is the batch of the whole run, and each rank gets its own rows of it,
    in an order that is the same on all; see docs/feeding.md. Batches of the whole run are counted, so a run may be
    resumed on another number of ranks.

    Source:
        torchdata's ``StatefulDataLoader``, whose state is tied to the number of workers.
    """

    def __init__(self, loader: DataLoader[Any], *, sharded: bool = False) -> None:
        """Wrap a loader; its sampler, workers and all else stay as they are.

        Args:
            loader: With or without shuffling, any sampler or batch sampler whose order follows from random
                states at the epoch's beginning: torch's, NumPy's, Python's, or a generator that is an attribute of it.
            sharded: Whether the loader of each rank gives that rank's own rows, instead of those of the whole run.
        Raises:
            OptionError: it is no DataLoader, or one that keeps its position itself; or ``sharded`` is no bool.
        """
        if not isinstance(loader, DataLoader) or hasattr(loader, "load_state_dict"):
            raise OptionError(
                f"ResumableLoader: loader must be a torch.utils.data.DataLoader, got {type(loader).__qualname__}. "
                f"A loader with a state_dict of its own, as torchdata's, is saved and loaded as it is."
            )
        self.loader = loader
        self._progress = Progress()
        self._is_resumed = False
        self._order = _Order(index_sampler(loader), order_generators(loader))
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        self.dealer: Dealer | None = Dealer(loader, sharded, "ResumableLoader")
        """Deals batches to ranks; None to have each rank take the loader's as they are."""
        self._is_part = self.dealer.kind == "sharded"
        self._dealt = DealtSampler(self._order)
        self.ordered = loader if self._is_iterable else with_index_sampler(loader, self._dealt)
        """The DataLoader that is iterated: the one that was passed, with a sampler that can begin in the middle."""

    @property
    def epoch(self) -> int:
        """How many passes over the data are complete."""
        return self._progress.epoch

    def __len__(self) -> int:
        """Count the batches of a whole pass."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Give the batches of a pass; of the one that was resumed, those that are left.

        A batch counts as used when it is handed out. A pass that is left early counts as complete once the
        next one begins.
        """
        batches, progress = self.begin_pass()
        for batch in batches if progress.dealing is None else progress.dealing.deal(batches):
            progress.count()
            yield batch
        progress.finish()

    def begin_pass(self) -> tuple[Iterator[Any], Progress]:
        """Begin a pass for a consumer that fetches ahead.

        Returns:
            The batches, of which none is counted; and where to count each that is used, and the end. Its
            ``dealing`` takes this rank's rows of each batch.
        Raises:
            RankError: ranks have drawn different orders.
        """
        old, resumed = self._progress, self._is_resumed
        fresh = Progress(old.epoch + (old.num_batches > 0))
        progress = Progress(old.epoch, old.num_batches, old.start, old.digest) if resumed else fresh
        dealing = progress.dealing = self._dealt.dealing = None if self.dealer is None else self.dealer.begin_pass()
        if dealing is None:
            batches = self._begin(progress, resumed)
        else:
            with dealing.same_order(self.ordered, self._order.generators):
                batches = self._begin(progress, resumed)
            dealing.check(self._order)
        # Only now: what interrupts the beginning leaves the position as it was.
        self._progress, self._is_resumed = progress, False
        return batches, progress

    def state_dict(self) -> dict[str, Any]:
        """Return the position: after the last batch that was used."""
        progress = self._progress
        # Between two passes, generators of the loader's own are where the next pass begins.
        start = {"generators": self._order.generator_states()} if progress.start is None else progress.start
        return {
            "epoch": progress.epoch,
            "num_batches": progress.num_batches,
            "start": start,
            "last_batch": progress.digest if progress.last is None else digest_of(progress.last),
            "in_order": is_in_order(self.loader),
        } | describe_data(self.loader)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; the next pass begins there.

        Raises:
            CheckpointMismatchError: it is no position, or one of an order drawn from other generators; or in the middle
                of a pass over other data, or of a shuffled one where this loader doesn't shuffle.
        """
        check_position(state, self.loader, self._order.generators, of_part=self._is_part)
        start = state["start"]
        is_begun = "global" in start
        if not is_begun:
            self._order.set_generators(start)
        self._progress = Progress(
            state["epoch"],
            state["num_batches"],
            start if is_begun else None,
            None if self._is_part else state.get("last_batch"),  # rank 0's
        )
        self._is_resumed = True

    def _begin(self, progress: Progress, resumed: bool) -> Iterator[Any]:
        if self._is_iterable:
            return self._begin_iterable(progress)
        self._order.progress = progress
        # A new iterator draws a seed for its workers: an interrupted pass had done so before it was saved.
        keeps_workers = self.loader.persistent_workers and progress.epoch > 0
        if resumed and (progress.start is not None or keeps_workers):
            with rng_states_kept(with_cuda=False):
                batches = iterate(self.loader, self.ordered)
            return with_order_drawn(batches)
        return with_order_drawn(iterate(self.loader, self.ordered))

    def _begin_iterable(self, progress: Progress) -> Iterator[Any]:
        if progress.start is None:
            progress.start = self._order.take_states()
            return iter(self.ordered)
        logger.info("ResumableLoader: %d batches of an IterableDataset are fetched again.", progress.num_batches)
        with rng_states_kept(with_cuda=False):
            self._order.return_to(progress.start)
            batches = iter(self.ordered)
            for _ in islice(batches, progress.num_batches):
                pass
        return batches


class _Order:
    """A sampler that notes the random states its pass began with, and can begin the same pass again."""

    def __init__(self, sampler: Any, generators: list[Any]) -> None:
        self.progress = Progress()
        """Of the pass that begins next."""
        self.whole_sampler, self.generators = sampler, generators

    def __len__(self) -> int:
        return len(self.whole_sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._draw(self.progress)

    def take_states(self) -> dict[str, Any]:
        """Return the random states of this moment, as those of a pass's beginning."""
        return {"global": take_rng_states(with_cuda=False), "generators": self.generator_states()}

    def return_to(self, start: Any) -> None:
        """Set the random states to those of a pass's beginning."""
        plan_rng_restore(start["global"])()
        self.set_generators(start)

    def generator_states(self) -> list[Any]:
        """Return the present states of the loader's own generators."""
        return [generator_state(generator) for generator in self.generators]

    def set_generators(self, start: Any) -> None:
        """Set the loader's own generators to a pass's beginning."""
        for generator, state in zip(self.generators, start["generators"]):
            set_generator(generator, state)

    def _draw(self, progress: Progress) -> Iterator[Any]:
        # Runs in the main process, when the first index is asked for.
        if progress.start is None:
            progress.start = self.take_states()
            batches = iter(self.whole_sampler)
        else:
            batches = self._draw_again(progress)
        for indices in batches:
            progress.drawn.append(frozen(indices))
            yield indices

    def _draw_again(self, progress: Progress) -> Iterator[Any]:
        with rng_states_kept(with_cuda=False):
            self.return_to(progress.start)
            indices = iter(self.whole_sampler)
            used = deque(islice(indices, progress.num_batches), maxlen=1)
            # Samplers draw their order when they are asked for an index. One that draws as it goes draws the rest from
            # the states of now.
            rest = [] if used else list(islice(indices, 1))
        check_drawn_again(used, progress.digest)
        return chain(rest, indices)
