"""One row, measured."""

from types import SimpleNamespace

import pytest

import everygpu
from tests.bench.rows import OWN, measure


# DDP's: tests/cli/test_bench.py.
@pytest.mark.parametrize(("peer", "num_devices"), [("single", 1), ("ours", 2), ("step", 2)])
def test_figures_of_a_row(peer, num_devices):
    row = measure(peer)
    assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
    assert row["steps_per_s"] == pytest.approx(1e3 / row["ms"])
    assert (row["num_devices"], row["rows_per_device"], row["peak_gib"]) == (num_devices, 6, [])
    assert row["samples_per_s"] == pytest.approx(6 * num_devices * row["steps_per_s"])
    assert 100 < row["startup_s"] < 200


def test_the_engine_that_ran_is_told(monkeypatch):
    stats = everygpu.TrainStep.stats
    monkeypatch.setattr(everygpu.DataParallel, "engine_in_use", property(lambda net: "threads"), raising=False)
    monkeypatch.setattr(
        everygpu.TrainStep, "stats", lambda step: SimpleNamespace(loss=stats(step).loss, engine="graphs")
    )
    assert [measure(peer)["engine"] for peer in ("single", "ours", "step")] == ["", "threads", "graphs"]


def test_rows_as_asked_for():
    assert measure("single", rows=9)["rows_per_device"] == 9


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("peer", ["single", "ddp"])
def test_a_wrong_model_is_refused(peer):
    assert "Return (model, loss, optimizer, batch)" in measure(peer, f"{OWN}three", num_devices=1)["refused"]


def test_what_does_not_run_here_is_an_error():
    assert "needs a GPU" in measure("dp")["error"]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("peer", ["single", "ddp"])
def test_out_of_memory_says_what_to_do(peer):
    assert "fewer rows for each GPU (--rows)" in measure(peer, f"{OWN}too_large", num_devices=1)["error"]


@pytest.mark.usefixtures("forked")
def test_a_failure_in_a_process_of_ddp_is_shown():
    with pytest.raises(Exception, match="KeyError: 'mine'"):
        measure("ddp", f"{OWN}failing", num_devices=1)
