"""Measure how many worker processes load data fastest, on the user's own DataLoader."""

import copy
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from everygpu.checkpoint.rng import rng_states_kept
from everygpu.errors import OptionError
from everygpu.feed.feeder import Feeder, Target

GAIN = 0.05
"""More workers are worth their memory when they are faster by this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What ``tune_workers`` found."""

    num_workers: int
    """The smallest number that is as fast as any, within 5%."""
    batches_per_s: dict[int, float]
    """By number of workers, in the order they were tried; after the first batch."""


def tune_workers(
    loader: DataLoader[Any],
    model_or_devices: Target = None,
    *,
    candidates: Iterable[int] | None = None,
    seconds: float = 3.0,
) -> WorkerReport:
    """Measure how many worker processes a DataLoader needs.

    Batches are loaded and sent to the devices as ``Feeder`` does, with nothing else to do, by 0, 1, 2, 4, … workers
    up to the CPU cores that this process may use, until more bring nothing. The random generators of this process
    stay as they are; those of the loader are seeded, as by any ``Feeder``::

        report = everygpu.tune_workers(loader, model)
        loader = DataLoader(dataset, num_workers=report.num_workers)

    Args:
        loader: A DataLoader of torch.
        model_or_devices: As for ``Feeder``.
        candidates: Numbers of workers to try, all of them, in this order.
        seconds: How long to measure each number of workers.
    Returns:
        The number, and what was measured.
    Raises:
        OptionError: ``loader`` is no DataLoader or gives no batch, or an option has no such value.
        Exception: what the loader raises.
    Source:
        ``os.sched_getaffinity`` for the cores; the numbers are measured, not derived from them.
    """
    if not isinstance(loader, DataLoader):
        raise OptionError(f"tune_workers: {loader!r} is no DataLoader. Other iterables have no workers to tune.")
    if not 0 < seconds < math.inf:
        raise OptionError(f"tune_workers: seconds must be more than 0, got {seconds!r}.")
    numbers = _numbers_to_try(candidates)
    rates: dict[int, float] = {}
    for num_workers in numbers:
        with rng_states_kept(with_cuda=False):
            rates[num_workers] = _measure(with_workers(loader, num_workers), model_or_devices, seconds)
        found = list(rates.values())
        # The last two, beyond the first ones, brought nothing over the best before.
        if candidates is None and len(found) > 4 and max(found[-2:]) < (1 + GAIN) * max(found[:-2]):
            break
    chosen = min(number for number, rate in rates.items() if rate * (1 + GAIN) >= max(rates.values()))
    return WorkerReport(num_workers=chosen, batches_per_s=rates)


def with_workers(loader: DataLoader[Any], num_workers: int) -> DataLoader[Any]:
    """Copy a DataLoader, of whatever subclass, with another number of workers."""
    twin = copy.copy(loader)
    own = vars(twin)  # DataLoader refuses to set some of these after its constructor
    own |= {"num_workers": num_workers, "persistent_workers": False, "_iterator": None}
    own["prefetch_factor"] = (loader.prefetch_factor or 2) if num_workers else None
    own["timeout"] = loader.timeout if num_workers else 0
    return twin


def _numbers_to_try(candidates: Iterable[int] | None) -> list[int]:
    if candidates is None:
        limit = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return [0, *(2**i for i in range(limit.bit_length()) if 2**i < limit), limit]
    numbers = list(candidates) if isinstance(candidates, Iterable) else []
    if not numbers or any(type(n) is not int or n < 0 for n in numbers):
        raise OptionError(
            f"tune_workers: candidates are whole numbers from 0, got {numbers or candidates!r}. "
            f"Leave them out for 0, 1, 2, 4 and so on."
        )
    return numbers


def _measure(loader: DataLoader[Any], target: Target, seconds: float) -> float:
    """Return the batches a second."""
    feeder = Feeder(loader, target, seed=0)
    feeder._order.is_alone = True  # ranks measure for different numbers of batches
    feeder._waiting.warns = False  # there is nothing else to do than to wait
    start = time.perf_counter()
    with iter(feeder) as feed:
        if next(feed, feed) is feed:
            raise OptionError("tune_workers: the loader gives no batch. Check its dataset and sampler.")
        begin = now = time.perf_counter()
        num_batches = 0
        for _ in feed:
            num_batches, now = num_batches + 1, time.perf_counter()
            if now - begin >= seconds:
                break
    return num_batches / (now - begin) if num_batches else 1 / (begin - start)
