"""Prefetch a loader's batches to their devices."""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from everygpu.checkpoint.dealing import Dealer, Dealing
from everygpu.checkpoint.loaders import generators_of, is_in_order, with_order_drawn
from everygpu.checkpoint.position import ResumableLoader
from everygpu.devices import parse_devices
from everygpu.devices.parse import DeviceLike
from everygpu.errors import OptionError
from everygpu.feed.arguments import check_loader, check_target, is_number
from everygpu.feed.one_pass import Feed, FeedOptions
from everygpu.feed.position import (
    Position,
    Tally,
    as_resumable,
    begin_pass,
    generator_state,
    parse_position,
    resumable_state,
)
from everygpu.feed.source import keeps_position
from everygpu.feed.waiting import FeedReport, WaitMeter
from everygpu.keys import wrapped_child
from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.scatter.split import ScatterSpec, Split, default_split, settle_split
from everygpu.step.train_step import TrainStep

Devices: TypeAlias = DeviceLike | Iterable[DeviceLike] | None
"""As ``DataParallel`` takes them."""

Target: TypeAlias = nn.Module | TrainStep | Devices
"""A model, or devices."""


class Feeder:
    """Iterate a loader's batches, each already on the devices that use it.

    A thread loads batches ahead and copies the rows of each replica from pinned memory straight to its device,
    beside the computation. Tensors come as ``ShardedBatch``es, which ``DataParallel`` uses where they are; on one
    device as plain tensors::

        for x, y in everygpu.Feeder(loader, model):
            loss = criterion(model(x), y)

    Leaving the loop early ends the thread and the loader's workers, and so does closing or dropping the iterator.

    Args:
        loader: Any iterable of batches: tensors of shape (..., rows, ...) in any nesting of containers.
            ``Replicated`` values are copied whole to every device, tensors in ``Rows`` to that of their row; what is
            no tensor stays as it is.
        model_or_devices: A ``DataParallel``, whose devices, ``dim`` and ``split`` are taken; another module, whose
            device is; a ``TrainStep``; or devices as ``DataParallel`` takes them, None for all.
        prefetch: How many batches to have on the devices ahead of the one in use. 0: no thread, each batch is
            sent when it is asked for.
        split: As for ``DataParallel``; taken from there when left out.
        dim: Likewise, else 0.
        timeout: Seconds after which a batch that has not come is an error; None to wait as long as it takes.
        sharded: Whether each rank's loader gives that rank's own rows. By default its batches are those of the whole
            run, under several ranks too: each gets its own rows of them, and reads no others where the DataLoader
            has indices. A `ResumableLoader` takes it itself.
    Raises:
        OptionError: an option has no such value, or ``loader`` can't be iterated.
        DeviceError: a device is unknown, absent or named twice.
    Source:
        ``DataLoader(pin_memory=True)`` with ``Tensor.to(non_blocking=True)``, ahead of time and to several devices.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        model_or_devices: Target = None,
        *,
        prefetch: int = 2,
        split: Split | None = None,
        dim: int | None = None,
        timeout: float | None = None,
        sharded: bool = False,
    ) -> None:
        check_loader(loader)
        check_target(model_or_devices, "Feeder")
        if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
            raise OptionError(f"Feeder: prefetch must be a whole number from 0, got {prefetch!r}. Leave it out for 2.")
        if timeout is not None and not (is_number(timeout) and timeout > 0):
            raise OptionError(f"Feeder: timeout must be more than 0 seconds, got {timeout!r}. Leave it out to wait.")
        if timeout is not None and prefetch == 0:
            raise OptionError("Feeder: timeout needs a thread that loads ahead, got prefetch=0. Leave out one of them.")
        if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
            raise OptionError(f"Feeder: dim must be an int, got {dim!r}. Leave it out for the model's, else 0.")
        if sharded and isinstance(loader, ResumableLoader):
            raise OptionError("Feeder: sharded must be left out over a ResumableLoader, got True. Pass it there.")
        self.loader = loader
        self.dealer: Dealer | None = None if isinstance(loader, ResumableLoader) else Dealer(loader, sharded, "Feeder")
        """Deals batches to ranks; None to have each rank take the loader's as they are."""
        self._data = as_resumable(loader, sharded)
        iterated = loader if self._data is None else self._data.loader
        self._options = FeedOptions(
            loader=iterated, route=find_route(model_or_devices, split, dim), prefetch=prefetch, timeout_s=timeout
        )
        self.meter = WaitMeter(iterated, prefetch)
        self._tally = Tally(Position())
        self._is_resumed = False
        self._feed: weakref.ref[Feed] | None = None

    def __iter__(self) -> Feed:
        """Begin a pass; after ``load_state_dict`` where that one stood. All ranks begin and leave it at the same place.

        Raises:
            RankError: ranks have drawn different orders.
        """
        if getattr(self._options.loader, "persistent_workers", False):
            self._end_pass()  # such workers serve one pass at a time
        iterator, self._tally, dealing = self._begin()
        self._is_resumed = False
        feed = Feed(iterator, self._options, self._tally, self.meter, dealing)
        self._feed = weakref.ref(feed)
        return feed

    def __len__(self) -> int:
        """Batches in a whole pass, if the loader knows."""
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def devices(self) -> list[torch.device]:
        """One per replica."""
        return list(self._options.route.devices)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been used up: batches handed out, not those prepared ahead.

        Returns:
            ``epoch`` (whole passes), ``batch`` (of the present pass), and what the loader needs to give the same
            order again. ``everygpu.save(path, feeder=feeder)`` stores it. Over a ``ResumableLoader`` it is that
            loader's position, wherever it was iterated; over a DataLoader the same.
        """
        if self._data is None:
            return asdict(self._tally.position) | {"in_order": is_in_order(self.loader)}
        state = self._data.state_dict()
        return asdict(Position(epoch=state["epoch"], batch=state["num_batches"])) | {"loader": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next pass begin where ``state_dict`` was taken.

        A DataLoader goes there as a `ResumableLoader` does; one that keeps its own position, such as torchdata's
        StatefulDataLoader, is put there; other loaders are iterated that far, in the same order if it is drawn from
        torch's generator.

        Raises:
            OptionError: ``state`` is no such state, or that of a Feeder over another kind of loader.
            CheckpointMismatchError: the DataLoader has other data than the one that was saved, or draws its order from
                other generators; it shuffles and did not in the pass that was saved, or the other way round.
        """
        position = parse_position(state, self.loader)
        if self._data is not None:
            self._data.load_state_dict(resumable_state(position, state.get("in_order"), self._data))
        self._tally, self._is_resumed = Tally(position), True

    def report(self) -> FeedReport:
        """Return how long the steps took so far, and how much of that was waiting for data."""
        return self.meter.report()

    def close(self) -> None:
        """End the pass that is on, its thread and its workers."""
        self._end_pass()

    def __enter__(self) -> "Feeder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self) -> tuple[Iterator[Any], Tally, Dealing | None]:
        """Begin to iterate the loader, where it was resumed at its position."""
        if self._data is not None:
            if self._data is not self.loader:
                self._data.dealer = self.dealer
            iterator, progress = self._data.begin_pass()
            tally = Tally(Position(epoch=progress.epoch, batch=progress.num_batches), progress)
            return iterator, tally, progress.dealing
        dealing = None if self.dealer is None else self.dealer.begin_pass()
        if dealing is None:
            return *self._begin_at(self._tally.position), None
        with dealing.same_order(self.loader, generators_of(self.loader)):
            iterator, tally = self._begin_at(self._tally.position)
            if not keeps_position(self.loader):  # such an iterator saves its sampler's position
                iterator = with_order_drawn(iterator)
        return iterator, tally, dealing

    def _begin_at(self, position: Position) -> tuple[Iterator[Any], Tally]:
        loader = self.loader
        # The generator's state is needed from before the loader draws its order from it.
        now = generator_state(loader)
        if self._is_resumed:
            iterator = begin_pass(loader, position)
        else:
            left_early = position.batch > 0
            position = Position(epoch=position.epoch + left_early)
            iterator = iter(loader)
        return iterator, Tally(position if position.batch else replace(position, generator=now))

    def _end_pass(self) -> None:
        feed = None if self._feed is None else self._feed()
        if feed is not None:
            feed.close()


def find_route(target: Target, split: Split | None, dim: int | None) -> ScatterSpec:
    """Work out where batches go; see ``Feeder``."""
    target = target.model if isinstance(target, TrainStep) else target
    model = data_parallel_in(target) if isinstance(target, nn.Module) else None
    if model is not None:
        devices, model_split, model_dim = list(model.replica_devices), model.split, model.dim
    else:
        devices, model_split, model_dim = _devices_of(target), default_split(), 0
    settled = settle_split(model_split if split is None else split, devices)
    return ScatterSpec(devices=tuple(devices), dim=model_dim if dim is None else dim, split=settled)


def data_parallel_in(model: nn.Module) -> DataParallel | None:
    """Return the ``DataParallel`` that a model is, perhaps inside of torch.compile."""
    while not isinstance(model, DataParallel):
        child = wrapped_child(model)
        if child is None:
            return None
        model = model.get_submodule(child)
    return model


def _devices_of(target: nn.Module | Devices) -> list[torch.device]:
    if not isinstance(target, nn.Module):
        return parse_devices(target)
    tensor = next(iter([*target.parameters(), *target.buffers()]), None)
    return [torch.device("cpu") if tensor is None else tensor.device]
