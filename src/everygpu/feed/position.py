"""A run's position in its data, and how a loader returns to it."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from everygpu.checkpoint.loaders import check_order, index_sampler, with_index_sampler, with_order_drawn
from everygpu.checkpoint.position import Progress
from everygpu.checkpoint.rng import to_bytes, to_tensor
from everygpu.errors import OptionError
from everygpu.feed.source import keeps_position


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """What has been used up."""

    epoch: int = 0
    """Passes over the loader before this one."""
    batch: int = 0
    """Batches of this pass that the consumer was given."""
    generator: bytes | None = None
    """State of the generator that a shuffling loader draws its order from, as the pass began."""
    loader: Any = None
    """The loader's own position, where it keeps one."""


class Tally:
    """Where the consumer of one pass stands.

    Args:
        position: Where the pass begins.
        progress: Of a ``ResumableLoader``, which is told what is used.
    """

    __slots__ = ("_progress", "position")

    def __init__(self, position: Position, progress: Progress | None = None) -> None:
        self.position, self._progress = position, progress

    def count(self, loader: Any) -> None:
        """Count a batch as used; ``loader`` is the loader's own position after it."""
        self.position = replace(self.position, batch=self.position.batch + 1, loader=loader)
        if self._progress is not None:
            self._progress.count()

    def finish(self, loader: Any) -> None:
        """Count the pass as complete."""
        self.position = Position(epoch=self.position.epoch + 1, loader=loader)
        if self._progress is not None:
            self._progress.finish()


def parse_position(state: Any, loader: Any) -> Position:
    """Read what ``Feeder.state_dict`` returned.

    Args:
        state: Of a Feeder over a loader like this one.
        loader: To be put there.
    Raises:
        OptionError: it is something else, or the position of a loader that keeps its own, which this one can't take.
        CheckpointMismatchError: it is in the middle of a pass in another order.
    """
    try:
        position = Position(**{name: value for name, value in state.items() if name != "in_order"})
        is_fit = position.epoch >= 0 and position.batch >= 0 and isinstance(position.generator, (bytes, type(None)))
    except (AttributeError, TypeError):
        is_fit = False
    if not is_fit:
        raise OptionError(
            f"Feeder.load_state_dict: needs what Feeder.state_dict returned, got {state!r:.200}. Pass that."
        )
    if position.loader is not None and not keeps_position(loader):
        raise OptionError(
            f"Feeder.load_state_dict: needs a loader that keeps its own position, as the saved one did, got "
            f"{type(loader).__qualname__}. Wrap it as it was wrapped then, for instance in a ResumableLoader."
        )
    if position.batch:
        check_order(state.get("in_order"), loader)
    return position


def begin_pass(loader: Any, position: Position) -> Iterator[Any]:
    """Start iterating a loader at a position.

    A loader that keeps its own position is put there. A DataLoader over a dataset with indices goes there without
    loading what it skips. Anything else is iterated that far.

    Args:
        loader: Any iterable.
        position: Its first ``batch`` batches are left out.
    Returns:
        An iterator over the rest.
    """
    if keeps_position(loader) and position.loader is not None:
        loader.load_state_dict(position.loader)
        return iter(loader)
    if position.batch == 0:
        return iter(loader)
    with _generator_at(loader, position.generator):
        if has_indices(loader):
            return _skip_indices(loader, position.batch)
        return _skip_batches(iter(loader), position.batch)


def generator_state(loader: Any) -> bytes:
    """Return the state of the generator that a shuffling loader draws its order from."""
    return to_bytes(_generator_of(loader).get_state())


def _generator_of(loader: Any) -> torch.Generator:
    own = getattr(loader, "generator", None)
    return own if isinstance(own, torch.Generator) else torch.default_generator


@contextmanager
def _generator_at(loader: Any, state: bytes | None) -> Iterator[None]:
    """Have the loader draw the order that it drew before; what others draw goes on as it was."""
    if state is None:
        yield
        return
    generator = _generator_of(loader)
    now = generator.get_state()
    generator.set_state(to_tensor(state))
    try:
        yield
    finally:
        if generator is torch.default_generator:
            generator.set_state(now)


def has_indices(loader: Any) -> bool:
    """Tell whether batches of a loader can be left out without loading them."""
    # Accelerate's loaders pretend to be of this class: another sampler would have to go into the loader that they hold.
    is_loader = issubclass(type(loader), DataLoader)
    return is_loader and not isinstance(loader.dataset, IterableDataset)


class _Rest:
    """A sampler without its first batches of indices."""

    def __init__(self, sampler: Any, num_skipped: int) -> None:
        self.whole_sampler = sampler
        self._num_skipped = num_skipped

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.whole_sampler), self._num_skipped, None)

    def __len__(self) -> int:
        return max(0, len(self.whole_sampler) - self._num_skipped)


def _skip_indices(loader: DataLoader[Any], num_skipped: int) -> Iterator[Any]:
    """Iterate a twin of the loader whose sampler begins later."""
    twin = with_index_sampler(loader, _Rest(index_sampler(loader), num_skipped))
    # Have it draw its order now, while the generator is where it was.
    return with_order_drawn(iter(twin))


def _skip_batches(iterator: Iterator[Any], num_skipped: int) -> Iterator[Any]:
    for _ in itertools.islice(iterator, num_skipped):
        pass
    return iterator
