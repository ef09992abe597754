"""One row, measured."""

from types import SimpleNamespace

import pytest

import everygpu
from everygpu.bench.measure import time_rounds
from tests.bench.measuring import OWN, measure


def test_the_engine_that_ran_is_told(monkeypatch):
    stats = everygpu.TrainStep.stats
    monkeypatch.setattr(everygpu.DataParallel, "engine_in_use", property(lambda net: "threads"), raising=False)
    monkeypatch.setattr(
        everygpu.TrainStep, "stats", lambda step: SimpleNamespace(loss=stats(step).loss, engine="capture")
    )
    assert [measure(way)["engine"] for way in ("bare", "loop", "step")] == ["", "threads", "capture"]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("way", ["bare", "ddp"])
def test_what_goes_wrong_is_told(way):
    assert "Return (model, loss, optimizer, batch)" in measure(way, f"{OWN}three", num_devices=1)["refused"]
    assert "fewer rows for each GPU (--rows)" in measure(way, f"{OWN}too_large", num_devices=1)["error"]
    with pytest.raises(Exception, match="mine"):
        measure(way, f"{OWN}failing", num_devices=1)


def test_what_does_not_run_here_is_an_error():
    assert "needs a GPU. Leave out" in measure("dp")["error"]


def test_rounds_are_whole_cycles_between_waits():
    done, waits = [], []
    row = time_rounds(lambda: done.append(1), lambda: waits.append(len(done)), rounds=3, steps=2)
    assert waits == [0, 2, 2, 4, 4, 6]
    assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
