"""Shares by measured speed and memory: in proportion, capped by what is scarce, and even within the noise."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import everygpu
from everygpu import DataParallel, Feeder
from everygpu.devices import speed
from everygpu.devices.speed import DeviceSpeed, measure_shares, measure_speed, share_out
from everygpu.errors import OptionError
from everygpu.parallel import gather
from everygpu.parallel.scatter import split
from tests.parallel.oracle import Mlp, assert_same, pair, rows

GIB = 2**30
CPU = torch.device("cpu")


def device(factor=1.0, memory=80 * GIB, spread=0.0):
    """What a device this many times as fast as another would measure."""
    return DeviceSpeed(rate=900 * factor, spread=spread, available_bytes=memory)


@pytest.mark.parametrize(
    ("speeds", "shares"),
    [
        ([device(), device()], None),
        ([device(), device(0.96)], None),
        ([device(), device(0.5)], [0.667, 0.333]),
        ([device(0.5), device(0.25), device(0.25)], [0.5, 0.25, 0.25]),
        ([device(), device(memory=40 * GIB)], [0.667, 0.333]),
        ([device(), device(memory=78 * GIB)], None),
        ([device(), device(0.5, memory=60 * GIB)], [0.667, 0.333]),
        ([device(), device(0.5, memory=20 * GIB)], [0.8, 0.2]),
        ([device(memory=None), device(0.5, memory=None)], [0.667, 0.333]),
        ([device(spread=0.6), device(0.5)], None),
        ([device(spread=0.3), device(0.5)], [0.667, 0.333]),
        ([device()], None),
        ([device(memory=0), device(memory=0)], None),
    ],
)
def test_shares(speeds, shares):
    assert share_out(speeds) == shares


@given(st.lists(st.tuples(st.floats(0.01, 1), st.integers(1, 100)), min_size=1, max_size=8))
def test_shares_add_up_and_the_better_device_never_gets_less(figures):
    speeds = [device(factor, memory * GIB) for factor, memory in figures]
    shares = share_out(speeds) or [1 / len(speeds)] * len(speeds)
    assert sum(shares) == pytest.approx(1, abs=0.01)
    for a, (factor, memory) in zip(shares, figures):
        for b, (other_factor, other_memory) in zip(shares, figures):
            assert a >= b or factor < other_factor or memory < other_memory


def test_shares_are_logged(caplog):
    caplog.set_level(logging.INFO, "everygpu")
    share_out([device(), device(0.5)])
    assert "shares [0.667, 0.333]" in caplog.text


class TestMeasuring:
    def test_a_device(self, devices):
        for used in dict.fromkeys(devices(2)):
            result = measure_speed(used)
            assert result.rate > 0
            assert result.spread >= 0
            assert (result.available_bytes is None) == (used.type == "cpu")

    def test_a_device_named_twice_is_measured_once(self, monkeypatch):
        asked = []
        monkeypatch.setattr(speed, "measure_speed", lambda d: asked.append(d) or device())
        assert measure_shares([CPU] * 3) is None
        assert asked == [CPU]

    def test_rates_are_runs_per_second_and_varying_ones_are_told(self, monkeypatch):
        rounds = iter([[0.1, 0.2, 0.2, 0.2, 0.3], [0.4, 0.8, 0.8, 0.8, 1.2]])
        monkeypatch.setattr(speed, "_time_rounds", lambda task, device: next(rounds))
        result = measure_speed(CPU)
        assert (result.rate, result.spread) == pytest.approx((2.5, 1.0))


@pytest.fixture
def unequal(monkeypatch):
    """Make the devices of a call measure as 1 to 2 to 1 …"""

    def pretend(used):
        return share_out([device(0.5 if i % 2 == 0 else 1.0) for i in range(len(used))])

    monkeypatch.setattr(split, "measure_shares", pretend)


class TestAutoSplit:
    """Unequal GPUs: ``split="auto"``."""

    def test_the_result_equals_one_device(self, devices, unequal):
        used = devices(3)
        model, bare = pair(Mlp, used, split="auto")
        for num_rows in (1, 2, 7, 16):
            assert_same(model, bare, rows(num_rows, 3, device=used[0]))

    def test_each_gets_its_share(self, unequal):
        model = DataParallel(Mlp(), ["cpu"] * 3, split="auto")
        out = model(torch.ones(16, 3))
        assert [len(s) for s in out.shards] == [4, 8, 4]
        assert model.split == [0.25, 0.5, 0.25]

    def test_equal_devices_get_even_shares(self):
        model = DataParallel(Mlp(), ["cpu"] * 3, split="auto")
        assert model.split == "even"
        assert [len(s) for s in model(torch.ones(10, 3)).shards] == [4, 3, 3]

    def test_the_feeder_splits_alike(self, unequal):
        model = DataParallel(Mlp(), ["cpu"] * 3, split="auto")
        (x,) = Feeder([torch.ones(16, 3)], model)
        assert [len(s) for s in x.shards] == [4, 8, 4]

    def test_nothing_is_measured_for_one_device(self, monkeypatch):
        monkeypatch.setattr(split, "measure_shares", lambda used: pytest.fail("measured"))
        assert DataParallel(Mlp(), "cpu", split="auto").split == "even"

    def test_only_where_devices_are_measured_beforehand(self):
        with pytest.raises(OptionError, match="split: must be"):
            everygpu.parallel.scatter(torch.ones(4), ["cpu"] * 2, split="auto")

    @pytest.mark.alone
    def test_on_gpus(self, devices):
        used = devices(8)
        model = DataParallel(Mlp(), used, split="auto")
        out = model(torch.ones(64, 3))
        assert gather(out).shape == (64, 2)
        if used[0].type == "cuda" and len({torch.cuda.get_device_name(d) for d in used}) == 1:
            assert model.split == "even", "GPUs of one kind, nobody else on them"
