"""Data-wait: measured as it is, warned about once, with the knob that helps."""

import itertools
import logging
import re
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from everygpu import Feeder
from everygpu.feed import one_pass
from everygpu.feed.waiting import WINDOW_STEPS, FeedReport, StepTime, WaitMeter, advise, count_cores, summarise

times = st.floats(0, 10)
steps = st.lists(st.builds(StepTime, total_s=times, wait_s=times, load_s=times, send_s=times), max_size=20)


def step(total=1.0, wait=0.0, load=0.5, send=0.0):
    return StepTime(total_s=total, wait_s=wait, load_s=load, send_s=send)


def report(**means):
    means = {"step_s": 1.0, "wait_s": 0.5, "load_s": 1.0, "send_s": 0.0, **means}
    return FeedReport(num_steps=100, **means)


def loader_with(**options):
    return DataLoader(TensorDataset(torch.zeros(4)), **options)


@settings(max_examples=25)
@given(steps)
def test_the_report_is_the_mean_of_all_steps(steps):
    meter = WaitMeter([], 2)
    for s in steps:
        meter.add(s)
    ours, expected = meter.report(), summarise(steps, len(steps))
    assert ours.num_steps == expected.num_steps == len(steps)
    for name in ("step_s", "wait_s", "load_s", "send_s", "wait_pct"):
        assert getattr(ours, name) == pytest.approx(getattr(expected, name))


def test_there_is_no_share_before_the_first_step():
    assert WaitMeter([], 2).report().wait_pct == 0


class TestWarning:
    @pytest.fixture(autouse=True)
    def listen(self, caplog):
        caplog.set_level(logging.WARNING, "everygpu")
        self.log = caplog

    def run(self, waits, meter=None):
        meter = meter or WaitMeter(itertools.count(), 2)
        for wait in waits:
            meter.add(step(wait=wait))
        return [r.getMessage() for r in self.log.records]

    def test_comes_once_with_figures(self):
        (line,) = self.run([0.34] * 3 * WINDOW_STEPS)
        assert line.startswith(
            "Feeder: waited for data during 34% of the last 100 steps (340.0 of 1000.0 ms a step; "
            "a batch takes the loader 500.0 ms, sending it 0.0 ms). "
        )
        assert self.log.records[0].name == "everygpu"

    @pytest.mark.parametrize("waits", [[0.1] * 300, [0.9] * (WINDOW_STEPS - 1), [5.0] + [0.0] * 99], ids=len)
    def test_does_not_come_up_to_a_tenth_or_before_enough_steps(self, waits):
        if waits[0] == 5.0:
            waits[0] = 9.9
        assert self.run(waits) == []

    def test_does_not_come_where_nothing_is_prepared_ahead(self):
        assert self.run([0.9] * WINDOW_STEPS, WaitMeter([], 0)) == []

    def test_looks_at_the_last_steps(self):
        assert len(self.run([0.0] * 10 * WINDOW_STEPS + [0.2] * WINDOW_STEPS)) == 1


class TestAdvice:
    def test_no_workers(self):
        assert advise(report(), loader_with(), 2).startswith("Raise num_workers, 0 now")
        assert "everygpu.tune_workers(loader)" in advise(report(), loader_with(), 2)

    def test_too_few_workers(self, monkeypatch):
        monkeypatch.setattr("everygpu.feed.waiting.count_cores", lambda: 16)
        assert "Raise num_workers, 1 now on 16 cores" in advise(report(), loader_with(num_workers=1), 2)

    def test_enough_workers(self, monkeypatch):
        monkeypatch.setattr("everygpu.feed.waiting.count_cores", lambda: 1)
        assert "All 1 cores load data (1 workers)" in advise(report(), loader_with(num_workers=1), 2)

    def test_a_plain_iterable(self):
        assert "DataLoader(..., num_workers=...)" in advise(report(), [], 2)

    def test_unpinned_batches(self):
        slow = report(load_s=0.1, send_s=0.6)
        assert "pin_memory=True" in advise(slow, loader_with(num_workers=1), 2)
        assert "uint8" in advise(slow, loader_with(num_workers=1, pin_memory=True), 2)
        assert "uint8" in advise(slow, [], 2)

    def test_uneven_batches(self):
        assert "raise prefetch=2" in advise(report(load_s=0.2), [], 2)


def test_cores_are_counted():
    assert count_cores() >= 1


class TestMeasuring:
    """With real loops; bounds are wide, for busy machines."""

    @pytest.fixture
    def clock(self, monkeypatch):
        """A clock that tests put forward, beside the real one."""
        clock = SimpleNamespace(ahead_s=0)
        now = SimpleNamespace(perf_counter=lambda: time.perf_counter() + clock.ahead_s, monotonic=time.monotonic)
        monkeypatch.setattr(one_pass, "time", now)
        return clock

    def test_a_slow_loader_makes_the_loop_wait(self):
        def load():
            for _ in range(12):
                time.sleep(0.02)
                yield torch.ones(2)

        feeder = Feeder(load(), "cpu")
        assert len(list(feeder)) == 12
        assert feeder.report().num_steps == 11
        assert feeder.report().wait_pct > 50
        assert feeder.report().load_s > 0.019

    def test_a_slow_loop_does_not_wait(self, clock):
        feeder = Feeder([torch.ones(2)] * 12, "cpu")
        for _ in feeder:
            clock.ahead_s += 100
        assert feeder.report().wait_pct < 40
        assert 100 <= feeder.report().step_s < 150

    def test_time_between_passes_is_no_step(self, clock):
        feeder = Feeder([torch.ones(2)] * 3, "cpu")
        list(feeder)
        clock.ahead_s += 1000
        list(feeder)
        assert feeder.report().num_steps == 4
        assert feeder.report().step_s < 100

    def test_an_input_bound_loop_is_warned(self, caplog):
        caplog.set_level(logging.WARNING, "everygpu")

        def load():
            for _ in range(2 * WINDOW_STEPS + 2):
                time.sleep(0.002)
                yield torch.ones(2)

        for _ in Feeder(load(), ["cpu"] * 2):
            pass
        (line,) = (r.getMessage() for r in caplog.records)
        assert re.match(r"Feeder: waited for data during \d+% of the last 100 steps \(\d+\.\d of \d+\.\d ms", line)
