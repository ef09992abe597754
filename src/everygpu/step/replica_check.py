"""Flipped bits: copies of parameters that must be equal, compared now and then."""

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from everygpu.errors import DivergedError
from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.replicas.module_tree import is_dense
from everygpu.step.strategy import UpdateStrategy

logger = logging.getLogger("everygpu")

_LARGE_BYTES, _NUM_ROWS = 2**14, 61
_LOW = 2**32 - 1


def make_check(model: DataParallel, strategy: UpdateStrategy, every: int | None) -> "ReplicaCheck | None":
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

    def __init__(self, model: DataParallel, strategy: UpdateStrategy, every: int) -> None:
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
                self._compare()
            self._num_at_last = self._num_updates

    def _compare(self) -> None:
        ranks, rows = self._model.rank_model, self._strategy.copies()
        params = {id(p): (name, p) for name, p in self._model.module.named_parameters()}
        if ranks is not None:  # every parameter has copies then
            rows = {**{key: [p] for key, (_, p) in params.items() if is_dense(p)}, **rows}
        rows = {key: row for key, row in rows.items() if row[0].numel()}
        digests = _digests([t for row in rows.values() for t in row])
        columns = [[[(f"replica {i} ({t.device})", next(digests)) for i, t in enumerate(row)] for row in rows.values()]]
        if ranks is not None:
            gathered = enumerate(ranks.group.gather(columns[0]))
            columns = [[[(f"rank {r}, {name}", x) for name, x in row] for row in column] for r, column in gathered]
        for (key, (first, *_)), parts in zip(rows.items(), zip(*columns)):
            copies = list(itertools.chain(*parts))
            usual = Counter(digest for _, digest in copies).most_common(1)[0][0]
            odd = [name for name, digest in copies if digest != usual]
            if odd:
                param = params[key][0] if key in params else f"a parameter of shape {tuple(first.shape)}"
                self._refuse(param, odd, [name for name, digest in copies if digest == usual])

    def _refuse(self, param: str, odd: list[str], rest: list[str]) -> None:
        age = self._num_updates - self._num_at_last
        raise DivergedError(
            f"TrainStep: replicas must have the same parameters, got other bits of {param} in {' and '.join(odd)} than "
            f"in {' and '.join(rest)}. Load a checkpoint that is {age} update{'s' * (age > 1)} old or older: the "
            f"copies were the same then. Bits flip in faulty hardware: run everygpu doctor, and look for ECC errors in "
            f"nvidia-smi -q -d ECC. Where code of yours writes parameters through .data, call step.refresh() after it."
        )


def _digests(tensors: Sequence[Tensor]) -> Iterator[int]:
    """Return a number of each tensor's values, in order; the host waits for each device once."""
    of_devices = {d: _digests_on(d, [t for t in tensors if t.device == d]) for d in {t.device for t in tensors}}
    found = {d: iter(digests.tolist()) for d, digests in of_devices.items()}
    return (next(found[t.device]) for t in tensors)


def _digests_on(device: torch.device, tensors: Sequence[Tensor]) -> Tensor:
    """Return numbers of tensors, shape (tensors,): any one flipped bit changes its tensor's.

    Words are changed by a bijection and weighted by odd numbers, so that flips of the same bit in two of them don't
    cancel: high bits have an effect on low ones.
    """
    words = list(map(_words_of, tensors))
    lengths = list(map(len, words))
    odd = torch.arange(1, 2 * max(lengths), 2, device=device)
    flat = torch.cat(words)  # a few kernels for all of them
    flat ^= (flat >> 32) & _LOW
    flat *= torch.cat([odd[:n] for n in lengths])
    ends = torch.tensor(list(itertools.accumulate(lengths)), device=device)
    sums = flat.cumsum(0)[ends - 1]
    return sums.diff(prepend=sums.new_zeros(1))


def _words_of(t: Tensor) -> Tensor:
    """Return a tensor's values as words of 64 bits; of large ones the sums of 61 parts.

    What falls on one word lies far apart, at a distance that is no power of 2: faults that flip several bits have other
    patterns.
    """
    data = t.detach().contiguous().view(-1).view(torch.uint8)
    data = data if data.storage_offset() % 8 == 0 else data.clone()
    num_rows = _NUM_ROWS if t.nbytes > _LARGE_BYTES else 1
    size = len(data) // (8 * num_rows) * 8 * num_rows
    whole, rest = data[:size].view(torch.int64).view(num_rows, -1), data[size:]
    words = whole.sum(0) if num_rows > 1 else whole[0]
    rest = F.pad(rest, (0, -len(rest) % 8)) if len(rest) % 8 else rest
    return torch.cat([words, rest.view(torch.int64)]) if len(rest) else words
