"""Measure the share of time that a training loop waits for data, and name the remedy."""

import logging
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

WINDOW_STEPS = 100
LIMIT_PCT = 10.0
"""Waiting for more than this share of so many steps is worth a line in the log."""

logger = logging.getLogger("everygpu")


class StepTime(NamedTuple):
    """Times around one batch, on the host's clock: the GPUs are not asked, so nothing waits for them."""

    total_s: float = 0.0
    """From one batch being handed over to the next."""
    wait_s: float = 0.0
    load_s: float = 0.0
    send_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedReport:
    """Means over the steps of a Feeder."""

    num_steps: int
    """Steps that were measured: the first batch of each pass, for which workers start, is not."""
    step_s: float
    """From one batch to the next."""
    wait_s: float
    """The part of a step in which the loop waited for data."""
    load_s: float
    """Seconds the loader needs for a batch, beside the loop's work."""
    send_s: float
    """What staging a batch and queuing its copies took, likewise."""

    @property
    def wait_pct(self) -> float:
        """Share of the time in which the loop waited: 0 to 100; 0 before the first step."""
        return 100 * self.wait_s / self.step_s if self.step_s else 0.0


def summarise(steps: Iterable[StepTime], num_steps: int) -> FeedReport:
    """Average over steps."""
    sums = StepTime(*map(sum, zip(StepTime(), *steps)))
    total_s, wait_s, load_s, send_s = (value / max(1, num_steps) for value in sums)
    return FeedReport(num_steps=num_steps, step_s=total_s, wait_s=wait_s, load_s=load_s, send_s=send_s)


class WaitMeter:
    """Adds up the times of all steps, and warns once when data is what the devices wait for."""

    def __init__(self, loader: Any, prefetch: int) -> None:
        self._loader, self._prefetch = loader, prefetch
        self._recent: deque[StepTime] = deque(maxlen=WINDOW_STEPS)
        self._sums = StepTime()
        self._num_steps = 0
        self.warns = prefetch > 0  # without, every batch is waited for

    def add(self, step: StepTime) -> None:
        """Count a step."""
        self._recent.append(step)
        self._num_steps += 1
        self._sums = StepTime(*map(sum, zip(self._sums, step)))
        if self._num_steps % WINDOW_STEPS == 0 and self.warns:
            self._warn(summarise(self._recent, WINDOW_STEPS))

    def report(self) -> FeedReport:
        """Average over all steps."""
        return summarise([self._sums], self._num_steps)

    def _warn(self, recent: FeedReport) -> None:
        if recent.wait_pct <= LIMIT_PCT:
            return
        self.warns = False
        logger.warning(
            "Feeder: waited for data during %.0f%% of the last %d steps (%.1f of %.1f ms a step; a batch takes the "
            "loader %.1f ms, sending it %.1f ms). %s",
            *(recent.wait_pct, recent.num_steps, 1e3 * recent.wait_s, 1e3 * recent.step_s),
            *(1e3 * recent.load_s, 1e3 * recent.send_s, advise(recent, self._loader, self._prefetch)),
        )


def advise(report: FeedReport, loader: Any, prefetch: int) -> str:
    """Name the one knob to turn first."""
    num_cores, measure = count_cores(), "everygpu.tune_workers(loader) measures which number is best."
    num_workers = loader.num_workers if isinstance(loader, DataLoader) else None
    if report.send_s > report.load_s:
        if num_workers and not loader.pin_memory:
            return "Set pin_memory=True in the DataLoader, so that batches come in memory that GPUs copy from."
        return "Send less: smaller types (uint8 instead of float32), converted on the GPU."
    if report.load_s + report.send_s < report.step_s - report.wait_s:
        return f"Batches come unevenly: raise prefetch={prefetch}, to have more of them ready."
    if num_workers is None:
        return "The iterable itself is slow: make it a Dataset, and load it with DataLoader(..., num_workers=...)."
    if num_workers < num_cores:
        return f"Raise num_workers, {num_workers} now on {num_cores} cores: {measure}"
    return (
        f"All {num_cores} cores load data ({num_workers} workers): make the dataset's work for an item "
        f"cheaper, store it prepared, or do part of it on the GPU."
    )


def count_cores() -> int:
    """Count the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
