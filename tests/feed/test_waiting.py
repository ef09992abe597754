"""Data-wait: measured as it is, warned about once. Bounds are wide, for busy machines."""

import time
from types import SimpleNamespace

import pytest
import torch

from everygpu import Feeder
from everygpu.feed import feeder_iterator
from everygpu.feed.feeder_iterator import WARN_AFTER_STEPS, FeedReport


@pytest.mark.parametrize(("waits", "num"), [([0.34] * 300, 1), ([0.1] * 300, 0), ([0.9] * (WARN_AFTER_STEPS - 1), 0)])
def test_a_warning_comes_once_with_figures(caplog, waits, num):
    report = FeedReport()
    for wait in waits:
        report.add(1.0, wait, warns=True)
    line = (
        "Feeder: waited for data during 34% of the first 100 steps (340.0 of 1000.0 ms a step). "
        "everygpu.tune_workers(loader) measures which num_workers is best."
    )
    assert caplog.messages == [line] * num


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests put forward, beside the real one."""
    clock = SimpleNamespace(ahead_s=0)
    now = SimpleNamespace(perf_counter=lambda: time.perf_counter() + clock.ahead_s, monotonic=time.monotonic)
    monkeypatch.setattr(feeder_iterator, "time", now)
    return clock


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_slow_loader_makes_the_loop_wait(caplog, prefetch):
    def load():
        for _ in range(WARN_AFTER_STEPS + 1):
            time.sleep(0.002)
            yield torch.ones(2)

    feeder = Feeder(load(), ["cpu"] * 2, prefetch=prefetch)
    assert len(list(feeder)) == WARN_AFTER_STEPS + 1
    assert feeder.report().num_steps == WARN_AFTER_STEPS
    assert feeder.report().wait_pct > 50
    assert len(caplog.messages) == (prefetch > 0), "without a thread every batch is waited for"


def test_a_slow_loop_does_not_wait_and_time_between_passes_is_no_step(clock):
    feeder = Feeder([torch.ones(2)] * 12, "cpu")
    for _ in feeder:
        clock.ahead_s += 100
    clock.ahead_s += 10**6
    for _ in feeder:
        clock.ahead_s += 100
    assert feeder.report().num_steps == 22
    assert feeder.report().wait_pct < 40
    assert 100 <= feeder.report().step_s < 150
