"""Several savers, one place; each wins or is refused, and what is there is never a mix."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

import everygpu
from everygpu.errors import CheckpointBusyError
from tests.faults.inject import fork
from tests.faults.savers import EVERYGPU, Weights, version_of

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
SECONDS = 1.5
NUM_SEEN = 5
"""Versions that each saver writes and a reader sees at least, however long that takes."""


def keep_saving(save, log: Path) -> None:
    """Save over and over, until the test has seen enough; write down how often it won and was refused."""
    won = refused = 0
    end, met = time.monotonic() + SECONDS, log.with_name("met")
    while time.monotonic() < end or won < NUM_SEEN or not met.exists() or not log.with_name("seen").exists():
        try:
            save(won)
            won += 1
        except CheckpointBusyError:
            refused += 1
            met.touch()
    log.write_text(f"{won} {refused}")


def counts(root: Path) -> list[list[int]]:
    return [[int(n) for n in log.read_text().split()] for log in sorted(root.glob("log*"))]


def test_two_processes_saving_to_one_path(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "ckpt"
    EVERYGPU.save(path, Weights(7))
    children = [
        fork(lambda i=i: keep_saving(lambda n: EVERYGPU.save(path, Weights(2 * n + i)), tmp_path / f"log{i}"))
        for i in range(2)
    ]
    seen = set()
    while not all(os.waitid(os.P_PID, c, os.WEXITED | os.WNOHANG | os.WNOWAIT) for c in children):
        with suppress(CheckpointBusyError):  # on a busy machine a read may take as long as five saves
            seen.add(version_of(EVERYGPU.load(path)))
        if len(seen) >= NUM_SEEN:
            (tmp_path / "seen").touch()
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    (won, refused), (won_too, refused_too) = counts(tmp_path)
    assert min(won, won_too) >= NUM_SEEN
    assert refused + refused_too >= 1, "the two never met: the test shows nothing"
    assert len(seen) >= NUM_SEEN
    assert os.listdir(tmp_path / "runs") == ["ckpt"]


def test_two_managers_in_one_directory(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    def save(i: int, n: int) -> None:
        checkpoints = everygpu.CheckpointManager(runs, keep=2, model=Weights(2 * n + i))
        checkpoints._is_resumed = True  # as both began in an empty directory
        checkpoints.save(n)

    (tmp_path / "seen").touch()
    children = [fork(lambda i=i: keep_saving(lambda n: save(i, n), tmp_path / f"log{i}")) for i in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    (won, refused), (won_too, refused_too) = counts(tmp_path)
    assert min(won, won_too) >= NUM_SEEN
    assert refused + refused_too >= 1, "the two never met: the test shows nothing"
    saved = [entry for entry in runs.iterdir() if entry.name.startswith("step-")]
    assert len(saved) == 2
    assert len(os.listdir(runs)) == 2
    for entry in saved:
        step = everygpu.load(entry)["step"]
        assert version_of(EVERYGPU.load(entry)) in (2 * step, 2 * step + 1)
