"""Prefetch a loader's batches to their devices."""

import weakref
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import Dataset

from everygpu.devices.parse import DeviceLike, parse_devices
from everygpu.errors import DeviceError, OptionError
from everygpu.feed.feeder_iterator import FeederIterator, FeedReport
from everygpu.feed.order import ResumableOrder
from everygpu.keys import wrapped_child
from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.scatter.split import ScatterSpec, default_split, resolve_split
from everygpu.step.train_step import TrainStep

Target: TypeAlias = nn.Module | TrainStep | DeviceLike | Iterable[DeviceLike] | None
"""A model, or devices."""


def _of_loader(name: str) -> Any:
    return property(lambda self: getattr(self.loader, name), doc=f"The loader's own ``{name}``.")


class Feeder:
    """Iterate a loader's batches, each already on the devices that use it, and know the position for a checkpoint.

    A thread loads batches ahead and copies the rows of each replica from pinned memory straight to its device. Tensors
    come as ``ShardedBatch``es, which ``DataParallel`` uses where they are; on one device as plain tensors::

        feeder = everygpu.Feeder(loader, model)
        for epoch in range(feeder.epoch, num_epochs):
            for x, y in feeder:
                loss = criterion(model(x), y)

    Save and load it with a checkpoint, and it continues after the last batch that your loop got, in the same order.
    The order of an epoch depends only on ``seed`` and the epoch's number; numbers of workers, replicas and ranks may
    change. Leaving the loop early ends the thread and the loader's workers; so does closing or deleting the iterator.

    Args:
        loader: Any iterable of batches: tensors of shape (..., rows, ...) in any nesting of containers. ``Replicated``
            values are copied whole to every device, tensors in ``Rows`` to that of their row.
        model_or_devices: A model or ``TrainStep``, for its devices, and for ``dim`` and ``split`` of a
            ``DataParallel``; or devices as for ``DataParallel``, None for all.
        prefetch: How many batches to keep on the devices ahead of the one in use; 0 disables the thread.
        seed: Determines all orders, 0 to 2**63 - 1. By default it is drawn from the loader's generator, or torch's. A
            loaded position has its own.
        timeout: Seconds after which a missing batch is an error; None waits forever. Without worker processes, the
            first batch of a loader without indices has no limit.
        sharded: Whether each rank's loader returns that rank's own rows. By default it returns batches of the whole
            run: each rank gets its own rows of them, and reads no others if the DataLoader has indices.
    Raises:
        OptionError: an option has no such value, or ``loader`` can't be iterated, or has ``in_order=False``.
        DeviceError: a device is unknown or absent, or ``model_or_devices`` is something else.
    Source:
        ``DataLoader(pin_memory=True)`` with ``Tensor.to(non_blocking=True)``, ahead of time and to several devices.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        model_or_devices: Target = None,
        *,
        prefetch: int = 2,
        seed: int | None = None,
        timeout: float | None = None,
        sharded: bool = False,
    ) -> None:
        kind = type(loader)
        name = loader.__qualname__ if isinstance(loader, type) else kind.__qualname__
        if isinstance(loader, Dataset):
            todo = "Pass DataLoader(dataset, batch_size=...), or batch_size=None if its items are batches."
            raise OptionError(f"Feeder: {name} is a dataset, whose items would be taken for batches. {todo}")
        if isinstance(loader, nn.Module) or not (hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")):
            raise OptionError(f"Feeder: {name} is no iterable of batches. Pass a DataLoader first, then the model.")
        if type(prefetch) is not int or prefetch < 0 or (timeout is not None and not (timeout > 0 and prefetch)):
            got = f"got {prefetch!r} and {timeout!r}"
            raise OptionError(f"Feeder: prefetch counts batches, from 0, and timeout seconds, with prefetch; {got}.")
        if seed is not None and not (type(seed) is int and 0 <= seed < 2**63):
            raise OptionError(f"Feeder: {seed!r} is no seed. Pass a whole number from 0 to 2**63 - 1, such as 0.")
        self.loader = loader
        self._order = ResumableOrder(loader, seed, sharded=sharded)
        self._route = find_route(model_or_devices)
        self._prefetch, self._timeout = prefetch, timeout
        self._report = FeedReport()
        self._feed: weakref.ref[FeederIterator] | None = None

    dataset, batch_size, num_workers, sampler, batch_sampler, drop_last, collate_fn = map(
        _of_loader, ("dataset", "batch_size", "num_workers", "sampler", "batch_sampler", "drop_last", "collate_fn")
    )

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self._route.devices))
        return f"Feeder({type(self.loader).__qualname__} to {devices}, epoch {self.epoch})"

    def __iter__(self) -> FeederIterator:
        """Begin an epoch, on all ranks; after ``load_state_dict`` at its position. An epoch left early is complete.

        Raises:
            CheckpointMismatchError: the order drawn again is not that of the epoch that was saved.
            RankError: ranks have drawn different orders.
        """
        if getattr(self._order.iterated, "persistent_workers", False):  # which serve one epoch at a time
            self._end_epoch()
        feed = FeederIterator(self._order, self._route, self._prefetch, self._timeout, self._report)
        self._feed = weakref.ref(feed)
        return feed

    def __len__(self) -> int:
        """Batches in a whole epoch, if the loader knows."""
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def devices(self) -> list[torch.device]:
        """One per replica."""
        return list(self._route.devices)

    @property
    def epoch(self) -> int:
        """How many passes are complete."""
        return self._order.position.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position: batches that the loop received, not those prepared ahead; the same on all ranks."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next epoch begin at the position of ``state_dict``.

        A DataLoader with indices skips used batches without loading them. A loader, sampler or dataset with a
        ``state_dict`` is restored from it. Everything else is read again.

        Raises:
            CheckpointMismatchError: ``state`` is no position, or in the middle of an epoch over other data, in another
                order or in other parts for ranks; nothing has changed then.
        """
        self._order.load_state_dict(state)

    def report(self) -> FeedReport:
        """Return how long steps have taken so far, and how much of that time the loop waited for data."""
        return replace(self._report)

    def close(self) -> None:
        """End the current epoch, its thread and its workers, also persistent ones."""
        self._end_epoch()
        if self._order.iterated is not self.loader:  # a copy of a DataLoader, whose workers wait for the next epoch
            self._order.iterated._iterator = None

    def __enter__(self) -> "Feeder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end_epoch(self) -> None:
        feed = None if self._feed is None else self._feed()
        if feed is not None:
            feed.close()


def find_route(target: Target) -> ScatterSpec:
    """Work out where batches go; see ``Feeder``."""
    target = target.model if isinstance(target, TrainStep) else target
    model = data_parallel_in(target) if isinstance(target, nn.Module) else None
    split, dim = default_split(), 0
    if model is not None:
        devices, split, dim = list(model.replica_devices), model.split, model.dim
    elif isinstance(target, nn.Module):
        devices = [next(iter([*target.parameters(), *target.buffers()]), torch.empty(0, device="cpu")).device]
    elif isinstance(target, (int, str, torch.device, Sequence, Set, Iterator, type(None))):
        devices = parse_devices(target)
    else:
        kind = target.__qualname__ if isinstance(target, type) else type(target).__qualname__
        raise DeviceError(f"Feeder: {kind} is no model or device. Pass the model, or devices: ['cuda:0', 'cuda:1'].")
    return ScatterSpec(devices=tuple(devices), dim=dim, split=resolve_split(split, devices))


def data_parallel_in(model: nn.Module) -> DataParallel | None:
    """Return the ``DataParallel`` that a model is, perhaps inside of torch.compile."""
    while not isinstance(model, DataParallel):
        child = wrapped_child(model)
        if child is None:
            return None
        model = model.get_submodule(child)
    return model
