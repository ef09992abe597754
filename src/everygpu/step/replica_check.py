"""A look for bits that have flipped: copies of parameters that have to be the same, compared now and then."""

import logging
from collections import Counter
from collections.abc import Iterator

import torch

from everygpu.errors import DivergedError
from everygpu.parallel.buckets.kept import KeptBucket
from everygpu.parallel.buckets.plan import plan_buckets
from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.replicas.module_tree import is_dense
from everygpu.step.copy_differences import Difference, find_differences, mend
from everygpu.step.sharded_update import ShardedUpdate
from everygpu.step.update_strategy import UpdateStrategy

logger = logging.getLogger("everygpu")

_ADVICE = (
    "Bits flip in faulty hardware: run everygpu doctor, and look for ECC errors in nvidia-smi -q -d ECC. Where code of "
    "yours writes parameters through .data, call step.refresh() after it."
)


def make_check(model: DataParallel, strategy: UpdateStrategy, every: int | None) -> "ReplicaCheck | None":
    """Return what is called before each update; None where there is nothing to compare, which is logged.

    Args:
        model: Runs the replicas.
        strategy: Keeps their parameters.
        every: Updates from one comparison to the next; None for none.
    """
    if every is None:
        return None
    keeps_copies = isinstance(strategy, ShardedUpdate) and len(model.replica_devices) > 1
    if model.rank_model is None and not keeps_copies:
        logger.warning(
            "TrainStep: check_every=%d compares nothing: parameters are kept on %s alone.",
            every,
            model.replica_devices[0],
        )
        return None
    return ReplicaCheck(model, strategy, every)


class ReplicaCheck:
    """Compares what replicas and ranks keep of each parameter, before every so many updates.

    Before, as an update writes a parameter anew on every device from the one that updates it: what had flipped there
    is in all copies then, and what had flipped elsewhere is gone.

    Args:
        model: Runs the replicas.
        strategy: Keeps their parameters.
        every: Updates from one comparison to the next.
    """

    def __init__(self, model: DataParallel, strategy: UpdateStrategy, every: int) -> None:
        self._model = model
        self._strategy = strategy
        self.every = every
        # Counted here: under ranks, all have to compare at once, whatever states were loaded.
        self._num_updates = self._num_at_last = 0

    def before_update(self) -> None:
        """Count an update, and compare if it is time to.

        Raises:
            DivergedError: copies differ, and no majority tells which is right; on all ranks.
        """
        self._num_updates += 1
        if self._num_updates % self.every == 0:
            with torch.inference_mode(False), torch.no_grad():
                self.compare()
            self._num_at_last = self._num_updates

    def compare(self) -> None:
        """Compare now; all ranks have to. See ``before_update``."""
        notices: dict[str, str] = {}
        num_params: Counter[str] = Counter()
        try:
            for copy, d, i in self._mended():
                num_params[copy] += 1
                notices.setdefault(copy, self._notice(copy, d, i))
        finally:  # also of what was mended before an error
            for copy, notice in notices.items():
                more = _and_more(num_params[copy])
                logger.warning(
                    "%s%s. They are mended; the last check was %s ago. %s", notice, more, self._age(), _ADVICE
                )

    def _mended(self) -> Iterator[tuple[str, Difference, int]]:
        """Mend what differs; yield each copy that was not as most are, by name and number, parameter by parameter."""
        ranks = self._model.rank_model
        for differences in find_differences(self._kept(), None if ranks is None else ranks.group):
            undecided = next((d for d in differences if not d.is_decided), None)
            if undecided is not None:
                raise DivergedError(self._refusal(undecided, len(differences)))
            for d in differences:
                mend(d)
                yield from ((copy, d, i) for i, copy in enumerate(d.copies) if d.wrong_elements(i).numel())

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

    def _refusal(self, d: Difference, num_params: int) -> str:
        values = ", ".join(f"{d.describe(0, i)} in {copy}" for i, copy in enumerate(d.copies))
        elements = _count(d.num_elements, "element")
        return (
            f"TrainStep: replicas must have the same parameters, got other bits in {elements} of {self._name(d)}, "
            f"the first at {list(d.index_of(0))}: {values}{_and_more(num_params)}. No majority tells which are right. "
            f"Load a checkpoint that is {self._age()} old or older: the copies were the same then. {_ADVICE}"
        )

    def _notice(self, copy: str, d: Difference, i: int) -> str:
        wrong = d.wrong_elements(i)
        first, elements = int(wrong[0]), _count(wrong.numel(), "element")
        return (
            f"TrainStep: {copy} had other bits than most of {len(d.copies)} copies in {elements} of {self._name(d)}, "
            f"the first at {list(d.index_of(first))}: {d.describe(first, i)} instead of {d.describe(first)}"
        )

    def _age(self) -> str:
        return _count(self._num_updates - self._num_at_last, "update")

    def _name(self, d: Difference) -> str:
        param = d.bucket.params[d.slot.index]
        names = (name for name, p in self._model.module.named_parameters() if p is param)
        return next(names, f"a parameter of shape {tuple(param.shape)}")


def _and_more(num_params: int) -> str:
    return f", and of {_count(num_params - 1, 'other parameter')}" if num_params > 1 else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"
