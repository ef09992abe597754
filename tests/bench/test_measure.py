"""One row, measured."""

from types import SimpleNamespace

import pytest

import everygpu
from tests.bench.rows import OWN, measure


def test_the_engine_that_ran_is_told(monkeypatch):
    stats = everygpu.TrainStep.stats
    monkeypatch.setattr(everygpu.DataParallel, "engine_in_use", property(lambda net: "threads"), raising=False)
    monkeypatch.setattr(
        everygpu.TrainStep, "stats", lambda step: SimpleNamespace(loss=stats(step).loss, engine="capture")
    )
    assert [measure(peer)["engine"] for peer in ("single", "ours", "step")] == ["", "threads", "capture"]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("peer", ["single", "ddp"])
def test_what_goes_wrong_is_told(peer):
    assert "Return (model, loss, optimizer, batch)" in measure(peer, f"{OWN}three", num_devices=1)["refused"]
    assert "fewer rows for each GPU (--rows)" in measure(peer, f"{OWN}too_large", num_devices=1)["error"]
    with pytest.raises(Exception, match="mine"):
        measure(peer, f"{OWN}failing", num_devices=1)


def test_what_does_not_run_here_is_an_error():
    assert "needs a GPU. Leave out" in measure("dp")["error"]
