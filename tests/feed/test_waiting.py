"""Data-wait: measured as it is, warned about once. Bounds are wide, for busy machines."""

import time
from types import SimpleNamespace

import pytest
import torch

from everygpu import Feeder
from everygpu.feed import one_pass
from everygpu.feed.one_pass import WINDOW_STEPS, FeedReport, Waiting


def warnings_of(caplog, waits, waiting=None):
    waiting = waiting or Waiting(warns=True)
    for wait in waits:
        waiting.add(1.0, wait, 0.5)
    return caplog.messages


def test_the_report_is_the_mean_of_all_steps():
    waiting = Waiting(warns=False)
    assert waiting.all == FeedReport()
    assert waiting.all.wait_pct == 0
    for step in ((1.0, 0.5, 0.2), (3.0, 0.5, 0.4)):
        waiting.add(*step)
    assert (waiting.all.num_steps, waiting.all.step_s, waiting.all.wait_s) == (2, 2.0, 0.5)
    assert waiting.all.load_s == pytest.approx(0.3)
    assert waiting.all.wait_pct == 25


def test_a_warning_comes_once_with_figures(caplog):
    (line,) = warnings_of(caplog, [0.34] * 3 * WINDOW_STEPS)
    assert line == (
        "Feeder: waited for data during 34% of the last 100 steps (340.0 of 1000.0 ms a step; a batch takes the "
        "loader 500.0 ms). everygpu.tune_workers(loader) measures which num_workers is best."
    )


@pytest.mark.parametrize("waits", [[0.1] * 300, [0.9] * (WINDOW_STEPS - 1), [9.9] + [0.0] * 99], ids=len)
def test_none_comes_up_to_a_tenth_or_before_enough_steps(caplog, waits):
    assert warnings_of(caplog, waits) == []


def test_the_last_steps_count(caplog):
    assert len(warnings_of(caplog, [0.0] * 10 * WINDOW_STEPS + [0.2] * WINDOW_STEPS)) == 1


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests put forward, beside the real one."""
    clock = SimpleNamespace(ahead_s=0)
    now = SimpleNamespace(perf_counter=lambda: time.perf_counter() + clock.ahead_s, monotonic=time.monotonic)
    monkeypatch.setattr(one_pass, "time", now)
    return clock


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_slow_loader_makes_the_loop_wait(caplog, prefetch):
    def load():
        for _ in range(WINDOW_STEPS + 1):
            time.sleep(0.002)
            yield torch.ones(2)

    feeder = Feeder(load(), ["cpu"] * 2, prefetch=prefetch)
    assert len(list(feeder)) == WINDOW_STEPS + 1
    assert feeder.report().num_steps == WINDOW_STEPS
    assert feeder.report().wait_pct > 50
    assert feeder.report().load_s > 0.0019
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
