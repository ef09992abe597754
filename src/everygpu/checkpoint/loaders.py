"""What a DataLoader draws its order from."""

import copy
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from everygpu.errors import CheckpointMismatchError
from everygpu.torch_private.data import LoaderIterator


def with_order_drawn(batches: Iterator[Any]) -> Iterator[Any]:
    """Have an iterator draw its order now, in this thread; with worker processes it has done so already."""
    if isinstance(batches, LoaderIterator) and not hasattr(batches, "_workers"):
        drawn = batches._sampler_iter
        batches._sampler_iter = chain(list(islice(drawn, 1)), drawn)
    return batches


def index_sampler(loader: DataLoader[Any]) -> Any:
    """Return what the loader asks for indices: for each batch, or for each sample where it makes no batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def with_index_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Copy a loader, of whatever subclass, with another sampler in place of its own."""
    twin = copy.copy(loader)
    # DataLoader refuses to set these after its constructor.
    twin.__dict__["sampler" if loader.batch_sampler is None else "batch_sampler"] = sampler
    twin.__dict__["_iterator"] = None
    return twin


def iterate(loader: DataLoader[Any], twin: DataLoader[Any]) -> Iterator[Any]:
    """Begin to iterate a loader by its twin's sampler; workers that persist stay the loader's own."""
    if not loader.persistent_workers or twin is loader:
        return iter(twin)
    own = loader._iterator
    if own is not None:
        twin._iterator, own._index_sampler = own, index_sampler(twin)
    try:
        batches = iter(twin)
    finally:
        if own is not None:  # for passes over the loader itself
            own._index_sampler = index_sampler(loader)
    if isinstance(batches, LoaderIterator):
        batches._index_sampler = index_sampler(loader)
        loader._iterator, twin._iterator = batches, None
    elif own is not None:  # a generator around the twin's iterator, which begins later
        twin._iterator = None
    return batches


def without_position(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader that begins at the first batch: of one that was resumed further on, a copy."""
    sampler = index_sampler(loader)
    return with_index_sampler(loader, sampler.whole_sampler) if hasattr(sampler, "whole_sampler") else loader


def generators_of(loader: Any) -> list[torch.Generator]:
    """Find the generators that a loader's order may come from, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def is_in_order(loader: Any) -> bool | None:
    """Tell whether a loader gives its dataset in order, not one drawn at random; None where that isn't known."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or type(batch_sampler) not in (BatchSampler, type(None)):
        return None
    kind = type(getattr(loader if batch_sampler is None else batch_sampler, "sampler", None))
    is_drawn = kind in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return True if kind is SequentialSampler else False if is_drawn else None


def check_order(was_in_order: bool | None, loader: Any) -> None:
    """Refuse to go on in the middle of a pass that was begun in another order.

    Raises:
        CheckpointMismatchError: the loader shuffles and did not then, or the other way round.
    """
    is_now = is_in_order(loader)
    if was_in_order is not None and is_now is not None and was_in_order != is_now:
        orders = {True: "the dataset's own", False: "one drawn at random"}
        raise CheckpointMismatchError(
            f"load: the pass must go on in the order that it was begun in, {orders[was_in_order]}, got "
            f"{orders[is_now]}, which would repeat samples and leave others out. Make the DataLoader as it was, with "
            f"shuffle={not was_in_order}, or leave the position out."
        )


def length_of(data: Any) -> int | None:
    """Count the batches of a loader's pass, or the rows of a dataset; None where that isn't known."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # an IterableDataset without a length
        return None


def is_data_loader(loader: Any) -> bool:
    """Tell whether a loader is torch's, so that another sampler can take the place of its own.

    Accelerate's loaders pretend to be: that sampler would have to go into the loader that they hold. One with a
    position of its own, as torchdata's, is iterated as it is.
    """
    return issubclass(type(loader), DataLoader) and not hasattr(loader, "load_state_dict")


def has_index_lists(loader: Any) -> bool:
    """Tell whether a loader draws a list of indices for each batch."""
    if not is_data_loader(loader) or isinstance(loader.dataset, IterableDataset):
        return False
    return loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)


def is_split_already(loader: Any) -> bool:
    """Tell whether a loader gives a rank its own rows, by a sampler of torch's that does so."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers: Sequence[Any] = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return isinstance(loader, DataLoader) and any(
        isinstance(s, DistributedSampler) and s.num_replicas > 1 for s in samplers
    )
