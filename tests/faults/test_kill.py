"""The process is killed while it saves; the old checkpoint loads, or the new one."""

import os
from pathlib import Path

import pytest

from tests.faults.inject import kill_at_boundaries, kill_randomly, what_is_there
from tests.faults.savers import EVERYGPU, Weights

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


@pytest.mark.parametrize("num_kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random_times(tmp_path: Path, num_kills: int) -> None:
    outcome = kill_randomly(EVERYGPU, tmp_path, num_kills=num_kills)
    assert set(outcome) == {"old", "new"}
    EVERYGPU.save(tmp_path / "ckpt", Weights(0))
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "timed"], "what the killed savers left was not cleared"


def test_killed_at_every_boundary_between_files(tmp_path: Path) -> None:
    def path(boundary: int) -> Path:
        return tmp_path / str(boundary) / "ckpt"

    seen = []
    boundaries = kill_at_boundaries(
        lambda boundary: EVERYGPU.save(path(boundary), Weights(2)),
        lambda boundary: EVERYGPU.save(path(boundary), Weights(1)),
    )
    for boundary in boundaries:
        seen.append(what_is_there(EVERYGPU, path(boundary), old=1))
        EVERYGPU.save(path(boundary), Weights(3))
        assert os.listdir(path(boundary).parent) == ["ckpt"], "what the killed saver left was not cleared"
        assert len(os.listdir(path(boundary))) == 3
    assert set(seen) == {"old", "new"}
    assert seen == sorted(seen, reverse=True), "first the old one, from some step on the new one"
    assert len(seen) >= 15
