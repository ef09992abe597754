"""The order of a loader's batches, and a run's position in it.

The order of an epoch comes from a seed and the epoch's number: the generators that it may be drawn from are seeded
while it is drawn. So an epoch can be resumed with other numbers of workers, replicas and ranks, by skipping the batches
that were used. A batch counts as used when the training loop gets it, as workers and a Feeder's thread fetch ahead.
"""

import copy
import logging
import math
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import index
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, IterDataPipe, Sampler, get_worker_info

from everygpu import tree
from everygpu.devices.seed import derive_seed, rng_states_kept
from everygpu.errors import CheckpointMismatchError, OptionError
from everygpu.feed.rank_rows import Kind, RankRows, is_data_loader, kind_of, length_of, samplers_of, say_once
from everygpu.ranks.group import Group, batch_digest, init_group
from everygpu.ranks.membership import find_membership
from everygpu.torch_private.core import LoaderIterator, numpy_seed_of_worker

logger = logging.getLogger("everygpu")


@dataclass(slots=True, kw_only=True)
class EpochPosition:
    """How far the training loop is in one epoch; an older one that continues doesn't move a later one's position."""

    epoch: int = 0
    batch: int = 0
    last: Any = None
    """Indices of the batch that was used last, or their digest where the epoch was resumed."""
    own: Any = None
    """The loader's own state, or its sampler's or dataset's, after the last batch that was used."""
    is_last: bool = False
    """Whether that is the state after the whole epoch."""
    drawn: deque[tuple[Any, Any, bool]] = field(default_factory=deque)
    """Indices, own state and whether it is the last one, of the batches that are drawn and not used yet."""

    def count(self) -> None:
        """Count a batch as used."""
        self.batch += 1
        if self.drawn:
            self.last, self.own, self.is_last = self.drawn.popleft()

    def finish(self) -> None:
        """Count the epoch as complete."""
        self.epoch, self.batch, self.last, self.is_last = self.epoch + 1, 0, None, False


class ResumableOrder:
    """Begins the epochs over one loader, and knows the position; ``is_alone``: of this rank, without the others."""

    def __init__(self, loader: Any, seed: int | None, *, sharded: bool, is_alone: bool = False) -> None:
        if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
            raise OptionError(
                "Feeder: a DataLoader with in_order=False can't be resumed or counted. Leave in_order out."
            )
        samplers, dataset = samplers_of(loader), getattr(loader, "dataset", None)
        self._generators = _generators_of([loader, *samplers], Sampler)
        self._dataset_generators = _generators_of([dataset], Dataset)
        own_generators = (g for g in self._generators if isinstance(g, torch.Generator) and g.device.type == "cpu")
        self.seed = _draw_seed(next(own_generators, None)) if seed is None else seed
        self.kind: Kind = kind_of(loader, sharded)
        self._advises, self._loader, self._is_alone = not sharded, loader, is_alone
        self.position, self._is_resumed = EpochPosition(), False
        named = {id(x): x for x in (loader, *samplers, dataset) if callable(getattr(x, "set_epoch", None))}
        self._with_epochs = list(named.values())
        """Objects whose ``set_epoch`` is called, as Accelerate and Lightning do."""
        self._split = next((s for s in samplers if isinstance(s, DistributedSampler)), None)
        self._parts: list[dict[str, Any]] | None = None
        """What each rank's loader is, where it gives that rank's own rows."""
        self._sampler: _OrderSampler | None = None
        self._stream: _Stream | None = None
        self._holder = loader if _keeps_state(loader) else None
        """What keeps a state of its own: the loader, a sampler, or an IterableDataset that is read in this process."""
        self.iterated = loader
        """What is iterated: of a DataLoader a copy, with a sampler that can begin in the middle."""
        if is_data_loader(loader):
            self.iterated = copy.copy(loader)
            own = vars(self.iterated)  # DataLoader refuses to set these after its constructor
            # Workers' seeds come from torch's generator, which is seeded meanwhile; the loader's own seeds the order.
            own["_iterator"], own["generator"] = None, None
            if isinstance(loader.dataset, IterableDataset):
                if loader.persistent_workers and not isinstance(loader.dataset, IterDataPipe):  # which torch seeds
                    self._stream = own["dataset"] = own["worker_init_fn"] = _Stream(loader)
                self._holder = loader.dataset if loader.num_workers == 0 and _keeps_state(loader.dataset) else None
            else:
                name = "sampler" if loader.batch_sampler is None else "batch_sampler"
                self._sampler = own[name] = _OrderSampler(getattr(loader, name), self._generators)
                self._holder = self._sampler.holder
                if loader.persistent_workers and id(dataset) in named:
                    text = "Feeder: workers that persist have copies of the dataset, which don't hear of set_epoch."
                    logger.warning("%s Leave persistent_workers out.", text)

    def begin(self) -> tuple[Iterator[Any], EpochPosition, RankRows | None]:
        """Begin an epoch: its batches, where to count those that are used, and what takes this rank's rows of each."""
        old, is_resumed = self.position, self._is_resumed
        now = EpochPosition(epoch=old.epoch + (old.batch > 0), own=None if old.batch else old.own)
        if is_resumed:
            now = replace(old, drawn=deque())
        group, rank_rows, rank = None if self._is_alone else init_group(), None, 0
        if group is not None:
            rank_rows = RankRows(group, self.kind)
            found = group.gather((self.seed, self._describe() if self.kind == "sharded" else {}))
            self.seed, self._parts = found[0][0], [part for _, part in found if part]
            rank = 0 if self.kind == "whole" else group.rank  # else transforms would draw the same on all ranks
            if group.rank == 0 and self._advises:
                say_once(self.kind)
        if is_resumed and (group is None or group.rank == 0):
            self._warn_of_what_may_differ(now, group)
        for holder in self._with_epochs:
            holder.set_epoch(now.epoch)
        number, own = derive_seed(self.seed, now.epoch), now.own if is_resumed else None
        start = derive_seed(number, rank)
        if self._sampler is not None and now.batch:  # workers would draw the numbers of the epoch's beginning again
            start = derive_seed(start, now.batch)
        with _seeded(start, self._dataset_generators):
            if self._stream is not None:
                self._stream.begin(start, now.epoch)
            if self._sampler is None:
                batches = self._begin_iterable(now, own)
            else:
                self._sampler.draw(now, number, own, rank_rows if self.kind == "indexed" else None)
                batches = self._begin_indexed(self._sampler, now)
        if rank_rows is not None and self._sampler is not None:
            rank_rows.check(self._sampler, self._sampler.first)
        # Only now: what interrupts the beginning leaves the position as it was.
        self.position, self._is_resumed = now, False
        return batches, now, rank_rows

    def _warn_of_what_may_differ(self, now: EpochPosition, group: Group | None) -> None:
        if now.own is not None and self.kind == "sharded" and group is not None and group.size > 1:
            logger.warning(
                "Feeder: every rank's loader continues from the state that rank 0's loader had. That is right if the "
                "state only counts. If it names a rank's own files, save and load it on each rank yourself."
            )
        in_process = self._sampler is None and not getattr(self._loader, "num_workers", 0)
        if now.own is None and now.batch and in_process and not hasattr(self._loader, "__getitem__"):
            logger.warning(
                "Feeder: %d batches are read again to come to the position. What the loader shuffles after its first "
                "batch, as in a second round over a DataLoader, is the same only if it seeds that itself.",
                now.batch,
            )
        of_stream = [getattr(self._loader, "dataset", self._loader)]
        drawn_by = of_stream if self._sampler is None else samplers_of(self._loader)
        # torch's samplers give the order of an epoch by its random numbers alone.
        drawn_by = [x for x in drawn_by if type(x).__module__ != Sampler.__module__]
        counting = [type(x).__qualname__ for x in drawn_by if type(x) not in (list, tuple, type(None))]
        if counting and now.epoch and now.own is None and not self._with_epochs:
            logger.warning(
                "Feeder: %s has no set_epoch. If it counts its epochs, it begins again with the first one, where the "
                "run continues with epoch %d (from 0). Give it set_epoch(epoch), or state_dict and load_state_dict.",
                *(counting[0], now.epoch),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was used."""
        now = self.position
        position = {"epoch": now.epoch, "batch": now.batch, "seed": self.seed, "last_batch": _digest_of(now.last)}
        data = self._describe() | ({"of_ranks": self._parts} if self._parts else {})
        return {**position, "own": now.own, "is_last": now.is_last, "data": data}

    def load_state_dict(self, state: Any) -> None:
        """Go to a position, where the next epoch begins; one of other data is refused in the middle of an epoch."""
        try:
            is_position = min(index(state[name]) for name in ("epoch", "batch", "seed")) >= 0
            is_position &= isinstance(state["data"], dict) and {"own", "is_last", "last_batch"} <= state.keys()
        except (LookupError, TypeError, AttributeError):
            is_position = False
        if not is_position:
            got = f"{type(state).__qualname__}{f' of {list(state)!r:.100}' if isinstance(state, dict) else ''}"
            raise CheckpointMismatchError(f"Feeder: no position: {got}. Pass what Feeder.state_dict returned.")
        if state["own"] is not None and self._holder is None:
            kind = type(self._loader).__qualname__
            raise CheckpointMismatchError(
                f"Feeder: the position is of a loader with a state_dict of its own; {kind} has none. Make it as before."
            )
        about = {name: state[name] for name in ("epoch", "own", "is_last")}
        about["batch"], about["last"] = self._find_batch(state) if state["batch"] else (0, None)
        self.position, self.seed, self._is_resumed = EpochPosition(**about), state["seed"], True
        self._parts = state["data"].get("of_ranks")

    def _find_batch(self, state: Any) -> tuple[int, Any]:
        """Return where this loader continues in an epoch, and the digest of the batch before; refuse other data."""
        before, now, num, last = state["data"], self._describe(), state["batch"], state["last_batch"]
        was, wanted = ((data.get("num_parts") or 0, data.get("batch_size") or 0) for data in (before, now))
        sampler: Any = self._split if type(self._split) is DistributedSampler and all((*was, *wanted)) else None
        saved_by, own, num_batches = before.get("part", 0), now.pop("part"), before.get("batches")
        if sampler is not None and was != wanted:
            before = {"rows": before["rows"]}
        elif sampler is None and self.kind == "sharded" and was[0] == wanted[0]:
            before = next((data for data in before.get("of_ranks", [before]) if data.get("part") == own), {})
        for name, value in now.items():
            if None not in (before.get(name), value) and before[name] != value:
                raise CheckpointMismatchError(
                    f"Feeder: the position is in the middle of an epoch, with {name}={before[name]} then, and {value} "
                    f"now: rows would be repeated and others left out. Make the DataLoader as it was, or leave it out."
                )
        if sampler is not None:
            options = {name: getattr(sampler, name) for name in ("shuffle", "seed", "drop_last")}
            again: Any = DistributedSampler(sampler.dataset, was[0], saved_by, **options)
            again.set_epoch(state["epoch"])
            _check_drawn_again([list(again)[(num - 1) * was[1] : num * was[1]]], last)
            if was != wanted:  # the ranks have used the first rows of one order
                used, each = num * math.prod(was), math.prod(wanted)
                if num >= num_batches:
                    return len(self._loader), None
                if used % each:
                    raise CheckpointMismatchError(
                        f"Feeder: {was[0]} ranks have used {used} rows of this epoch, in batches of {was[1]}, and "
                        f"{wanted[0]} ranks with batches of {wanted[1]} don't come to that row. Pass batch_size="
                        f"{max(1, math.prod(was) // wanted[0])}, or resume from the end of an epoch."
                    )
                return used // each, None
        return num, last if saved_by == own else None

    def _begin_indexed(self, sampler: "_OrderSampler", now: EpochPosition) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self.iterated)
        if not isinstance(batches, LoaderIterator):  # an __iter__ of its own, which may begin later
            batches = _begun(batches)
        if now.batch and not sampler.is_asked:
            raise CheckpointMismatchError(
                "Feeder: this DataLoader's own __iter__ asks its sampler for no indices, so an epoch can't be resumed "
                "in its middle. Save between two epochs, or use a DataLoader without an __iter__ of its own."
            )
        return batches

    def _begin_iterable(self, now: EpochPosition, own: Any) -> Iterator[Any]:
        if self.iterated is self._loader:
            _reseed(self._generators)
        if own is not None and self._holder is not None:
            self._holder.load_state_dict(copy.deepcopy(own))
        if now.is_last:
            return iter(())
        batches: Iterator[Any] = iter(self.iterated)
        for _ in islice(batches, now.batch if own is None else 0):
            pass
        if isinstance(batches, LoaderIterator) and hasattr(batches, "_workers"):
            return batches  # which have drawn their seeds by now
        if self._holder is not None:
            batches = _noted(batches, now, self._holder, lambda _: None)
        return _begun(batches)

    def _describe(self) -> dict[str, Any]:
        """Return what must be unchanged to resume in the middle of an epoch, as far as it is known."""
        dataset = getattr(self._loader, "dataset", None)
        reads_again = isinstance(dataset, IterableDataset) and self._holder is None
        found = None if self.kind != "sharded" or self._is_alone else find_membership()
        part, num_parts = (0, 1) if found is None else (found.rank, found.size)
        if self._split is not None:
            part, num_parts = self._split.rank, self._split.num_replicas
        return {
            "part": part,
            "num_parts": num_parts,
            "batches": length_of(self._loader),
            "rows": length_of(dataset),
            "batch_size": getattr(self._loader, "batch_size", None),
            "num_workers": getattr(self._loader, "num_workers", None) if reads_again else None,
        }


class _Stream(IterableDataset[Any]):
    """A stream in persistent workers: seeded in each epoch as new workers are, after ``set_epoch``."""

    def __init__(self, loader: Any) -> None:
        self._dataset, self._init = loader.dataset, loader.worker_init_fn
        self._now = torch.zeros(3, dtype=torch.uint64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, number: int, epoch: int) -> None:
        """Prepare the workers' next iterators for an epoch."""
        seed = _draw_seed(torch.Generator().manual_seed(number))
        self._now.copy_(torch.tensor([number, seed, epoch], dtype=torch.uint64, device="cpu"))

    def __call__(self, worker: int) -> None:
        """Be the loader's ``worker_init_fn``, for which the dataset is the user's."""
        object.__setattr__(get_worker_info(), "dataset", self._dataset)
        if self._init is not None:
            self._init(worker)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info().id  # type: ignore[union-attr]
        number, seed, epoch = self._now.tolist()
        torch.manual_seed(number)
        _reseed(_generators_of([self._dataset], Dataset))
        random.seed(seed + worker)
        torch.manual_seed(seed + worker)
        numpy.random.seed(numpy_seed_of_worker(seed, worker))
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(epoch)
        return iter(self._dataset)


class _OrderSampler:
    """Takes the place of a DataLoader's sampler: gives the order that was drawn for the epoch."""

    def __init__(self, sampler: Any, generators: Sequence[Any]) -> None:
        self._sampler, self._generators = sampler, generators
        self.holder = next((s for s in _with_inner([sampler], Sampler) if _keeps_state(s)), None)
        """The sampler that keeps its own state; None if no sampler does."""
        self.is_asked = False
        """Whether the epoch has asked for indices."""

    def draw(self, now: EpochPosition, number: int, own: Any, cuts: RankRows | None) -> None:
        """Draw an epoch's order from its number. ``own``: state to continue from; ``cuts`` keeps the rank's indices."""
        self.is_asked, self._num_ended = False, 0
        self._now, self._at, self._number, self._cuts = now, replace(now), number, cuts
        self._start = copy.deepcopy(self.holder.state_dict()) if self.holder is not None and own is None else own
        self._order = self._draw(own)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        # With workers, DataLoader asks twice at once. One with an __iter__ of its own may ask again: for another order
        # when one has ended, and before that for the same from its beginning.
        if self._has_ended:
            self._order = self._draw(None)
        elif self._is_begun:
            self._now.drawn.clear()
            if self._cuts is not None:
                self._cuts.are_empty.clear()
            self._order = self._draw(self._start)
        self.is_asked = True
        return self._order

    def _draw(self, own: Any) -> Iterator[Any]:
        is_first, self._is_begun, self._has_ended = self._num_ended == 0, False, False
        with _seeded(derive_seed(self._number, self._num_ended), self._generators):
            if own is not None and self.holder is not None:
                self.holder.load_state_dict(copy.deepcopy(own))
            # Lists are copied: a sampler with a state is asked for the next before one is used, and may fill it again.
            order = () if self._at.is_last and is_first else self._sampler
            indices = (list(i) if type(i) is list else i for i in order)
            if is_first and own is None:
                _check_drawn_again(deque(islice(indices, self._at.batch), maxlen=1), self._at.last)
            self.first = list(islice(indices, 1))  # samplers draw their order when they are asked for an index
        found = self._noted(chain(self.first, indices))
        return found if self._cuts is None else self._cuts.cut(found)

    def _noted(self, indices: Iterator[Any]) -> Iterator[Any]:
        self._is_begun = True
        yield from _noted(indices, self._now, self.holder, _frozen)
        self._has_ended, self._num_ended = True, self._num_ended + 1


def _keeps_state(value: Any) -> bool:
    """Whether a loader, sampler or dataset has a state; of Accelerate's loaders, whether what they hold has."""
    holders = {id(x): x for x in (value, getattr(value, "base_dataloader", value))}.values()
    methods = [getattr(holder, name, None) for holder in holders for name in ("state_dict", "load_state_dict")]
    return all(map(callable, methods)) and not isinstance(value, torch.nn.Module)


def _generators_of(holders: Iterable[Any], within: type) -> list[Any]:
    """Find the generators that are attributes of some objects, and of those of a type within them, each once."""
    kinds = (random.Random, torch.Generator, numpy.random.Generator, numpy.random.RandomState)
    values = [value for holder in _with_inner(holders, within) for value in getattr(holder, "__dict__", {}).values()]
    found = [v for v in values if isinstance(v, kinds) and not isinstance(v, random.SystemRandom)]
    return list({id(value): value for value in found}.values())


def _with_inner(holders: Iterable[Any], within: type) -> list[Any]:
    left, found = list(holders), {}
    while left:
        holder = left.pop(0)
        if id(holder) not in found:
            found[id(holder)] = holder
            left += [value for value in getattr(holder, "__dict__", {}).values() if isinstance(value, within)]
    return list(found.values())


def _draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed from a generator, or torch's, as DataLoader does for its workers."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


@contextmanager
def _seeded(number: int, generators: Sequence[Any]) -> Iterator[None]:
    """Seed the process's generators within, and some others for good; those on GPUs stay as they are."""
    with rng_states_kept(with_cuda=False):
        random.seed(number)
        numpy.random.seed(number % 2**32)
        torch.default_generator.manual_seed(number)
        _reseed(generators)
        yield


def _reseed(generators: Sequence[Any]) -> None:
    """Seed each generator from torch's."""
    for position, generator in enumerate(generators, start=1):
        number = derive_seed(torch.default_generator.initial_seed(), position)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(number)
        elif isinstance(generator, random.Random):
            generator.seed(number)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = type(generator.bit_generator)(number).state
        else:
            generator.seed(number % 2**32)


def _begun(batches: Iterator[Any]) -> Iterator[Any]:
    """Draw an iterator's first item now, in this thread and with these generators."""
    return chain(list(islice(batches, 1)), batches)


def _noted(batches: Iterator[Any], now: EpochPosition, holder: Any, indices_of: Callable[[Any], Any]) -> Iterator[Any]:
    """Note each batch, with the state of its holder after it."""
    if holder is None:
        for batch in batches:
            now.drawn.append((indices_of(batch), None, False))
            yield batch
        return
    # The next batch is drawn before one is given: the last one, with the state of the next epoch, is known by that.
    ahead, before = list(islice(batches, 1)), None
    while ahead:
        batch, own = ahead[0], copy.deepcopy(holder.state_dict())
        before = _digest_in(batch) if before is None else 0
        ahead = list(islice(batches, 1))
        if before and before != _digest_in(batch):
            raise OptionError(
                "Feeder: The loader fills the same tensor with each batch. As it has a state_dict, the next batch is "
                "drawn before one is used: have it yield copies, x.clone()."
            )
        now.drawn.append((indices_of(batch), own if ahead else copy.deepcopy(holder.state_dict()), not ahead))
        yield batch


def _digest_in(batch: Any) -> int:
    arrays = (x for _, x in tree.leaves(batch, "") if tree.is_array(x))
    return batch_digest(batch) + sum(zlib.crc32(x.tobytes()) for x in arrays)


def _frozen(indices: Any) -> Any:
    """Return what stays as it is: samplers may use their list again."""
    return tuple(indices) if isinstance(indices, (list, tuple)) else (indices,) if isinstance(indices, int) else None


def _digest_of(last: Any) -> int | None:
    """Return the CRC-32 of a batch's indices as a list in text; None where they are no whole numbers."""
    try:
        return zlib.crc32(str([index(i) for i in last]).encode()) if isinstance(last, tuple) else last
    except TypeError:
        return None


def _check_drawn_again(used: Iterable[Any], digest: int | None) -> None:
    for again in used:
        now = _digest_of(_frozen(again))
        if None not in (digest, now) and digest != now:
            raise CheckpointMismatchError(
                "Feeder: the sampler doesn't draw the same order again in the middle of an epoch, so samples would be "
                "repeated. Have it draw all as the epoch begins, or from its own generator, of the same data."
            )
