"""What a Feeder publishes for ``everygpu top``."""

import gc

import pytest
import torch

from everygpu import Feeder
from everygpu.devices.figures import Publisher, read_runs
from everygpu.feed.publishing import Board
from everygpu.feed.waiting import FeedReport

BATCHES = [torch.randn(4, 2) for _ in range(6)]
REPORT = FeedReport(num_steps=10, step_s=0.25, wait_s=0.05, load_s=0.1, send_s=0.0)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Publish where only this test reads."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_a_pass_is_seen_while_it_goes_on(devices):
    feeder = Feeder(BATCHES, devices(2), publish=True)
    with feeder:
        batches = iter(feeder)
        next(batches)
        assert read_runs() == [], "nothing has been measured"
        next(batches)
        (run,) = read_runs()
        assert run.figures.num_steps == 1
        assert run.figures.steps_per_s > 0
        assert 0 <= run.figures.data_wait_pct <= 100
        names = ["cpu" if d.type == "cpu" else f"GPU-{torch.cuda.get_device_properties(d).uuid}" for d in devices(2)]
        assert list(run.figures.devices) == names
    assert read_runs() == []


@pytest.mark.parametrize(("size", "place"), [("2", "box:29500"), ("1", None)])
def test_ranks_publish_where_they_have_met(monkeypatch, size, place):
    for name, value in {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "box", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    board = Board([torch.device("cpu")])
    board.show(1, lambda: REPORT)
    assert [run.meets_at for run in read_runs()] == [place]
    board.close()


def test_figures_go_with_the_feeder():
    feeder = Feeder(BATCHES, ["cpu"], publish=True)
    assert len(list(feeder)) == 6
    assert len(read_runs()) == 1
    del feeder
    gc.collect()
    assert read_runs() == []


def test_nothing_is_published_unasked_on_the_cpu():
    feeder = Feeder(BATCHES, ["cpu"] * 2)
    assert len(list(feeder)) == 6
    assert read_runs() == []


def test_figures_are_made_only_when_they_are_due():
    now_s = [0.0]
    asked = []
    board = Board([torch.device("cpu")], lambda **_: Publisher("train.py", clock=lambda: now_s[0]))

    def recent():
        asked.append(now_s[0])
        return REPORT

    for step in range(1, 31):
        board.show(step, recent)
        now_s[0] += 0.1
    assert asked == pytest.approx([0.0, 1.0, 2.0], abs=0.11)
    (run,) = read_runs()
    assert run.figures.steps_per_s == 4.0
    assert run.figures.data_wait_pct == pytest.approx(20.0)
    board.close()
    assert read_runs() == []
