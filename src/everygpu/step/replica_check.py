"""Flipped bits: copies of parameters that must be equal, compared now and then."""

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from everygpu.errors import DivergedError
from everygpu.parallel.buckets import WORD_BYTES, KeptBucket, plan_buckets
from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.replicas.module_tree import is_dense
from everygpu.step.sharded_update import ShardedUpdate

logger = logging.getLogger("everygpu")

_ADVICE = (
    "Bits flip in faulty hardware: run everygpu doctor, and look for ECC errors in nvidia-smi -q -d ECC. Where code of "
    "yours writes parameters through .data, call step.refresh() after it."
)

T = TypeVar("T")

_LARGE_BYTES, _NUM_ROWS = 2**21, 61
_LOW = 2**32 - 1


def make_check(model: DataParallel, strategy: ShardedUpdate, every: int | None) -> "ReplicaCheck | None":
    """Return what is called before each update; None where there is nothing to compare, which is logged."""
    if every is None:
        return None
    keeps_copies = strategy.is_spread and len(model.replica_devices) > 1
    if model.rank_model is None and not keeps_copies:
        home = model.replica_devices[0]
        logger.warning("TrainStep: check_every=%d compares nothing: parameters are kept on %s alone.", every, home)
        return None
    return ReplicaCheck(model, strategy, every)


class ReplicaCheck:
    """Compares what replicas and ranks keep of each parameter, before every so many updates.

    Before the update, as it overwrites a parameter on every device from the one that updates it: what had flipped there
    is in all copies then, and what had flipped elsewhere is gone.
    """

    def __init__(self, model: DataParallel, strategy: ShardedUpdate, every: int) -> None:
        self._model = model
        self._strategy = strategy
        self.every = every
        # Counted here: under ranks, all have to compare at once, whatever states were loaded.
        self._num_updates = self._num_at_last = 0

    def before_update(self) -> None:
        """Count an update, and compare if it is time to; raise a DivergedError on all ranks if copies differ."""
        self._num_updates += 1
        if self._num_updates % self.every == 0:
            with torch.inference_mode(False), torch.no_grad():
                self.compare()
            self._num_at_last = self._num_updates

    def compare(self) -> None:
        """Compare now; all ranks have to. See ``before_update``."""
        buckets = [bucket for bucket in self._kept() if any(slot.numel for slot in bucket.plan.slots)]
        for bucket, digests in zip(buckets, self._digests(bucket.memory() for bucket in buckets)):
            if len(set(digests)) > 1:
                self._refuse(bucket)

    def _kept(self) -> list[KeptBucket]:
        """Return what this process keeps; under ranks that is every parameter, also where it has a single replica."""
        found = self._strategy.kept()
        if self._model.rank_model is None:
            return found
        known = {id(p) for bucket in found for p in bucket.params.values()}
        rest = [p for p in self._model.module.parameters() if id(p) not in known and is_dense(p)]
        params = dict(enumerate(rest))
        return found + [
            KeptBucket(plan=plan, params={s.index: params[s.index] for s in plan.slots}, flats=[], is_flat=False)
            for plan in plan_buckets(rest, 1)
        ]

    def _digests(self, rows: Iterable[Sequence[Tensor]]) -> list[list[int]]:
        """Return for each row of copies the digests of all ranks' ones; waits for each device once."""
        found = [[_digest(memory) for memory in row] for row in rows]
        devices = dict.fromkeys(digest.device for row in found for digest in row)
        numbers = {d: iter(torch.stack([t for row in found for t in row if t.device == d]).tolist()) for d in devices}
        ranks = self._gather([[next(numbers[digest.device]) for digest in row] for row in found])
        return [list(itertools.chain(*parts)) for parts in zip(*ranks)]

    def _refuse(self, bucket: KeptBucket) -> None:
        """Raise for the first parameter of a bucket whose copies differ; between parameters, they may."""
        copies, slots = bucket.memory(), bucket.plan.slots
        found = self._digests([[m[slot.start : slot.start + slot.numel].clone() for m in copies] for slot in slots])
        names = _name_copies(self._gather([str(memory.device) for memory in copies]))
        num_updates = self._num_updates - self._num_at_last
        for slot, digests in zip(slots, found):
            usual = Counter(digests).most_common(1)[0][0]
            odd = [name for name, digest in zip(names, digests) if digest != usual]
            if odd:
                rest = [name for name in names if name not in odd]
                raise DivergedError(
                    f"TrainStep: replicas must have the same parameters, got other bits of "
                    f"{self._name(bucket.params[slot.index])} in {' and '.join(odd)} than in {' and '.join(rest)}. "
                    f"Load a checkpoint that is {num_updates} update{'s' * (num_updates > 1)} old or older: the copies "
                    f"were the same then. {_ADVICE}"
                )

    def _name(self, param: Tensor) -> str:
        names = (name for name, p in self._model.module.named_parameters() if p is param)
        return next(names, f"a parameter of shape {tuple(param.shape)}")

    def _gather(self, value: T) -> list[T]:
        ranks = self._model.rank_model
        return [value] if ranks is None else ranks.group.gather(value)


def _digest(memory: Tensor) -> Tensor:
    """Return a number of flat memory, shape (): any one flipped bit changes it.

    Large memory is summed first, to 1/61 of its size: what falls on one word lies far apart, at a distance that is no
    power of 2, so faults that flip several bits have other patterns. Then words are changed by a bijection and weighted
    by odd numbers, so that flips of the same bit in two of them don't cancel: high bits have an effect on low ones.
    """
    data, num_rows = memory.view(torch.uint8), _NUM_ROWS if memory.nbytes > _LARGE_BYTES else 1
    size = data.numel() // (WORD_BYTES * num_rows) * WORD_BYTES * num_rows
    rest = F.pad(data[size:], (0, (size - data.numel()) % WORD_BYTES))
    words = torch.cat([data[:size].view(torch.int64).view(num_rows, -1).sum(0), rest.view(torch.int64)])
    words ^= (words >> 32) & _LOW
    return (words * torch.arange(1, 2 * len(words), 2, device=words.device)).sum()


def _name_copies(devices: list[list[str]]) -> list[str]:
    """Name each copy by its place, given the devices of each rank."""
    names = [[f"replica {i} ({device})" for i, device in enumerate(row)] for row in devices]
    if len(devices) == 1:
        return names[0]
    return [f"rank {rank}, {name}" for rank, row in enumerate(names) for name in row]
