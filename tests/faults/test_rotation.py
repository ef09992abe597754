"""A run that keeps one checkpoint is killed anywhere while it saves the next; one is always whole."""

import os
import random
import signal
import time
import warnings
from pathlib import Path

import pytest

import everygpu
from tests.faults.inject import fork, kill_at_boundaries
from tests.faults.savers import Weights, version_of

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


def save(directory: Path, step: int, version: int | None = None) -> None:
    model = Weights(-1)
    checkpoints = everygpu.CheckpointManager(directory, keep=1, model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoints.resume()
    model.load_state_dict(Weights(step if version is None else version).state_dict())
    checkpoints.save(step)


def what_loads(directory: Path) -> int:
    model = Weights(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        everygpu.load(directory, model=model)
    return version_of(model.state_dict())


@pytest.mark.parametrize(
    ("next_step", "every"), [(2, 3), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (2, 1))]
)
def test_killed_at_boundaries(tmp_path: Path, next_step: int, every: int) -> None:
    boundaries = kill_at_boundaries(
        lambda boundary: save(tmp_path / str(boundary), next_step, version=2),
        lambda boundary: save(tmp_path / str(boundary), 1),
        every,
    )
    seen = []
    for boundary in boundaries:
        directory = tmp_path / str(boundary)
        seen.append(what_loads(directory))
        save(directory, 3)
        assert os.listdir(directory) == ["step-00000003"], "what was left was not cleared"
        assert what_loads(directory) == 3
    assert set(seen) == {1, 2}
    assert seen == sorted(seen)
    assert len(seen) >= 18 // every


@pytest.mark.slow
def test_killed_while_the_earlier_run_is_overwritten(tmp_path: Path) -> None:
    def prepare(boundary: int) -> None:
        checkpoints = everygpu.CheckpointManager(tmp_path / str(boundary), keep=2, model=Weights(5))
        for step in (5, 6):
            checkpoints.save(step)

    def begin(boundary: int) -> None:
        everygpu.CheckpointManager(tmp_path / str(boundary), keep=2, model=Weights(1), overwrite=True).save(1)

    seen = []
    for boundary in kill_at_boundaries(begin, prepare):
        directory = tmp_path / str(boundary)
        seen.append(what_loads(directory))
        begin(boundary)
        assert os.listdir(directory) == ["step-00000001"]
        assert what_loads(directory) == 1
    assert set(seen) == {5, 1}


@pytest.mark.slow
def test_killed_at_random_times(tmp_path: Path) -> None:
    chance, num_kills, last = random.Random(0), 0, 0
    save(tmp_path, 0)
    while num_kills < 30 or last < 10:  # on a busy machine, more of them come before a save is through
        child = fork(lambda first=last + 1: [save(tmp_path, step) for step in range(first, first + 100)])
        time.sleep(chance.uniform(0.01, 0.08) * (1 + num_kills // 30))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        loaded = what_loads(tmp_path)
        assert loaded >= last
        last, num_kills = loaded, num_kills + 1
