"""A rank that fails or pauses, and what ranks compare and log."""

import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from everygpu.errors import RankError
from everygpu.ranks.group import current_group, init_group
from tests.ranks.harness import ROOT, run_ranks, running

pytestmark = pytest.mark.usefixtures("warm_python")

SCRIPT = """
import os, torch, everygpu
model = everygpu.DataParallel(torch.nn.Linear(2, 1), ["cpu"])
for step in range(6):
    model(torch.ones(2, 2)).sum().backward()
    if step == 3 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ZeroDivisionError("the model of rank 1")
print("came to step 5", flush=True)
"""


@pytest.mark.slow  # of five processes each imports torch; test_checkpoints.py has torchrun start all again, by forks
def test_an_error_of_one_rank_is_shown_and_torchrun_starts_all_again(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", str(tmp_path / "train.py")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "ZeroDivisionError: the model of rank 1" in done.stderr
    assert done.stdout.count("came to step 5") == 2


def pause(folder):
    group = init_group()
    (folder / f"ready{group.rank}").touch()
    group.gather(None)
    return "lives"


def test_a_rank_that_pauses_is_waited_for(tmp_path):
    with running(pause, tmp_path, size=2, folder=tmp_path) as ranks:
        ranks.processes[1].send_signal(signal.SIGSTOP)  # on its way, or about to start
        time.sleep(3)
        ranks.processes[1].send_signal(signal.SIGCONT)
        assert ranks.results() == ["lives"] * 2


def leave_early():
    group = init_group()
    if group.rank == 0:
        with pytest.raises(RankError, match="Rank 0 lost the others in a gather over ranks: one has failed or ended"):
            [group.gather(None) for _ in range(2)]
        os._exit(0)  # as the others are gone


def test_a_rank_that_ends_before_the_others_is_an_error_of_theirs(tmp_path):
    with running(leave_early, size=2, folder=tmp_path) as ranks:
        assert ranks.wait() == [0, 0], ranks.said


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def compare_and_log():
    assert current_group() is None
    group = init_group()
    assert current_group() is group
    logger, lines = logging.getLogger("everygpu"), Lines()
    logger.addHandler(lines)
    logger.warning("a warning of %d", 1)
    logger.error("an error of %d", 1)
    group.check_same("parameters", {"weight": [(2, 3), "float32"]})
    if group.rank == 0:
        group.leave_note("greeting", "hello")
    else:
        assert group.read_note("greeting") == "hello"
        with pytest.raises(RankError, match="rank 0 must do what rank 1 waits for"):
            group.read_note("farewell", limit_s=0.1)
    with pytest.raises(RankError) as caught:
        group.check_same("parameters", {"weight": [(2, 3 + group.rank), "float32"]})
    return lines.lines, str(caught.value)


def test_descriptions_are_compared_and_lines_come_once(tmp_path):
    (first, error), (second, same) = run_ranks(compare_and_log, size=2, folder=tmp_path)
    assert first == ["a warning of 1", "rank 0: an error of 1"]
    assert second == ["rank 1: an error of 1"]
    assert error == same
    shapes = "weight: [(2, 3), 'float32'] on rank 0, [(2, 4), 'float32'] on rank 1"
    assert f"parameters must be the same on all ranks, got {shapes}" in error
