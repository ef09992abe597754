"""Measure how many worker processes load data fastest, on the user's own DataLoader."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from everygpu.checkpoint.loaders import generators_of
from everygpu.checkpoint.position import ResumableLoader
from everygpu.errors import OptionError
from everygpu.feed.arguments import check_callback, check_target, describe, is_number
from everygpu.feed.feeder import Feeder, Target
from everygpu.feed.restore import restored_generators
from everygpu.feed.waiting import count_cores

GAIN = 0.05
"""More workers are worth their memory when they are faster by this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTrial:
    """One number of workers that was tried."""

    num_workers: int
    batches_per_s: float
    """After the first batch."""
    first_batch_s: float
    """Starting the workers and loading the first batch: what each pass costs, unless workers are persistent."""
    num_batches: int
    """How many the rate was measured over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What ``tune_workers`` found."""

    num_workers: int
    """The smallest number that is as fast as any, within the gain that counts."""
    trials: tuple[WorkerTrial, ...]
    """In the order they were run."""

    @property
    def best(self) -> WorkerTrial:
        """The trial of that number."""
        return next(trial for trial in self.trials if trial.num_workers == self.num_workers)


def tune_workers(
    loader: DataLoader[Any] | ResumableLoader,
    model_or_devices: Target = None,
    *,
    candidates: Iterable[int] | None = None,
    seconds: float = 3.0,
    on_trial: Callable[[WorkerTrial], object] | None = None,
) -> WorkerReport:
    """Measure how many worker processes a DataLoader needs.

    Batches are loaded and sent to the devices as ``Feeder`` does, with nothing else to do, by 0, 1, 2, 4, … workers
    up to the CPU cores that this process may use, until more bring nothing. The loader itself stays as it is, and so
    do the random generators of this process::

        report = everygpu.tune_workers(loader, model)
        loader = DataLoader(dataset, num_workers=report.num_workers)

    Args:
        loader: A DataLoader of torch, or a ``ResumableLoader`` around one, whose position stays.
        model_or_devices: As for ``Feeder``.
        candidates: Numbers of workers to try, all of them, in this order.
        seconds: How long to measure each number of workers.
        on_trial: Called after each trial.
    Returns:
        The number, and what was tried.
    Raises:
        OptionError: ``loader`` is no DataLoader or gives no batch, or an option has no such value.
        Exception: what the loader raises.
    Source:
        ``os.sched_getaffinity`` for the cores; the numbers are measured, not derived from them.
    """
    loader = loader.loader if isinstance(loader, ResumableLoader) else loader
    numbers, all_of_them = _check_options(loader, candidates, seconds)
    check_target(model_or_devices, "tune_workers")
    check_callback(on_trial, "tune_workers")
    trials: list[WorkerTrial] = []
    for num_workers in numbers:
        with restored_generators(*generators_of(loader)):
            trials.append(_try(loader, model_or_devices, num_workers, seconds))
        if on_trial is not None:
            on_trial(trials[-1])
        if not all_of_them and _has_peaked([t.batches_per_s for t in trials]):
            break
    return WorkerReport(num_workers=choose(trials), trials=tuple(trials))


def choose(trials: Iterable[WorkerTrial]) -> int:
    """Return the smallest number of workers that is as fast as any, within the gain that counts."""
    known = list(trials)
    best = max(t.batches_per_s for t in known)
    return min(t.num_workers for t in known if t.batches_per_s * (1 + GAIN) >= best)


def with_workers(loader: DataLoader[Any], num_workers: int) -> DataLoader[Any]:
    """Make a DataLoader like another one, with another number of workers.

    Args:
        loader: Left as it is; its dataset, sampler, generator and functions are shared.
        num_workers: 0 or more.
    """
    same = ("dataset", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "in_order", "generator")
    options: dict[str, Any] = {name: getattr(loader, name) for name in same}
    if not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None:
        options["batch_sampler"] = loader.batch_sampler
    else:
        options["batch_size"], options["drop_last"] = loader.batch_size, loader.drop_last
        if not isinstance(loader.dataset, IterableDataset):
            options["sampler"] = loader.sampler
    if num_workers:
        options["multiprocessing_context"] = loader.multiprocessing_context
        options["prefetch_factor"] = loader.prefetch_factor
    else:
        options["timeout"] = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return DataLoader(num_workers=num_workers, **options)


def _check_options(loader: DataLoader[Any], candidates: Iterable[int] | None, seconds: float) -> tuple[list[int], bool]:
    if not isinstance(loader, DataLoader):
        raise OptionError(
            f"tune_workers: loader must be a torch.utils.data.DataLoader, got {describe(loader)}. "
            f"Other iterables have no workers to tune."
        )
    if not is_number(seconds) or not 0 < seconds < math.inf:
        raise OptionError(f"tune_workers: seconds must be more than 0, got {seconds!r}.")
    if candidates is None:
        return numbers_to_try(), False
    numbers = list(candidates) if isinstance(candidates, Iterable) else []
    if not numbers or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in numbers):
        raise OptionError(
            f"tune_workers: candidates must be one or more whole numbers from 0, got {numbers or candidates!r}. "
            f"Leave them out for 0, 1, 2, 4 and so on."
        )
    return numbers, True


def numbers_to_try() -> list[int]:
    """Return the numbers of workers that are tried, unless a smaller one turns out to be enough: 0, 1, 2, 4, …"""
    limit = count_cores()
    return [0, *(2**i for i in range(limit.bit_length()) if 2**i < limit), limit]


def _try(loader: DataLoader[Any], target: Target, num_workers: int, seconds: float) -> WorkerTrial:
    twin = with_workers(loader, num_workers)
    start = time.perf_counter()
    feeder = Feeder(twin, target)
    feeder.dealer = None  # ranks measure for different numbers of batches
    feeder.meter.warns = False  # there is nothing else to do than to wait
    with iter(feeder) as feed:
        first_batch(feed, "tune_workers")
        begin = now = time.perf_counter()
        num_batches = 0
        for _ in feed:
            num_batches, now = num_batches + 1, time.perf_counter()
            if now - begin >= seconds:
                break
    first_batch_s = begin - start
    rate = num_batches / (now - begin) if num_batches else 1 / first_batch_s
    return WorkerTrial(
        num_workers=num_workers, batches_per_s=rate, first_batch_s=first_batch_s, num_batches=num_batches
    )


def first_batch(batches: Iterator[Any], caller: str) -> Any:
    """Return a loader's first batch.

    Args:
        batches: The loader's.
        caller: Whose error it is.
    Raises:
        OptionError: there is none.
    """
    for batch in batches:
        return batch
    raise OptionError(f"{caller}: the loader must give a batch, got none. Check its dataset and sampler.")


def _has_peaked(rates: list[float]) -> bool:
    """Tell whether the last two numbers of workers, beyond the first ones, brought nothing over the best before."""
    return len(rates) > 4 and max(rates[-2:]) < (1 + GAIN) * max(rates[:-2])
