"""A rank that fails, is killed or stopped: the others end with a RankError, in time."""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import time

import pytest
import torch.distributed as dist

from everygpu.checkpoint.background import Background
from everygpu.errors import RankError
from everygpu.ranks import watch
from everygpu.ranks.differences import find_difference
from everygpu.ranks.group import join, joined
from tests.ranks.harness import environment, free_port, run_ranks, running

pytestmark = pytest.mark.usefixtures("warm_python")
IN_TIME_S = 60
"""With the start, which torch's stores delay by seconds where rank 0 comes last."""


def join_soon(silent_s=20.0):
    """Join with limits that make for short tests."""
    watch.SILENT_S, watch.ASLEEP_S, watch.GRACE_S, watch.BROKEN_S, watch.LEAVE_S = silent_s, 0.7, 0.3, 1.5, 0.6
    group = join()
    group.barrier()
    return group


def end_of(process, limit_s=IN_TIME_S):
    """Wait for one process; return its exit code and what it wrote to its standard error."""
    err = process.communicate(timeout=limit_s)[1].decode()
    return process.returncode, err


def be_stuck():
    """Wait as in a collective that never ends: in C++, without the GIL."""
    ctypes.CDLL(None).sleep(60)


def raise_uncaught(folder):
    group = join_soon()
    if group.rank == 2:
        Background().start(lambda check: write_slowly(folder / "checkpoint"))
    group.barrier()
    if group.rank == 1:
        raise ZeroDivisionError("the model of rank 1")
    if group.rank == 2:
        be_stuck()
    group.barrier()


def write_slowly(path):
    time.sleep(1.0)
    path.touch()


def test_an_error_reaches_ranks_that_communicate_and_ranks_that_are_stuck(tmp_path):
    with running(raise_uncaught, tmp_path, size=3, folder=tmp_path) as ranks:
        ends = [end_of(process) for process in ranks.processes]
    assert (tmp_path / "checkpoint").exists(), "what is being saved is finished first"
    assert [code for code, _ in ends] == [1, 1, 1]
    assert "RankError" not in ends[1][1]
    for _, err in (ends[0], ends[2]):
        assert "RankError: ranks: every rank must go on without an error, got one on rank 1" in err
        assert f"process {ranks.processes[1].pid}" in err
        assert "ZeroDivisionError: the model of rank 1" in err
        assert "in raise_uncaught" in err


def raise_caught():
    group = join_soon()
    if group.rank == 1:
        be_stuck()
    with pytest.raises(ZeroDivisionError), group.telling("cuda:3"):
        raise ZeroDivisionError
    with pytest.raises(RankError, match="ZeroDivisionError"), group.telling():
        pytest.fail("a call after the failure is made")
    with pytest.raises(RankError, match=r"rank 0 \(host .*, process \d+\), device cuda:3"):
        group.barrier()
    return "went on"


def test_an_error_that_the_script_catches_ends_the_others_and_its_next_call(tmp_path):
    with running(raise_caught, size=2, folder=tmp_path) as ranks:
        (own_code, own_err), (code, err) = [end_of(process) for process in ranks.processes]
    assert own_code == 0, own_err
    assert code == 1
    assert "device cuda:3: ZeroDivisionError" in err


def lose_one(rank, how, with_fork):
    group = join_soon(2.0)
    if group.rank == rank:
        if with_fork and not os.fork():  # as a worker of a loader, which keeps its parent's connections open
            os.closerange(0, 3)
            time.sleep(4)
            os._exit(0)
        os.kill(os.getpid(), how)
    if group.rank == 2:
        be_stuck()
    group.barrier()


def leave_early():
    group = join_soon()
    watch.BROKEN_S = 0.3
    if group.rank != 1:
        group.barrier()


def test_a_rank_that_leaves_before_the_others_is_named(tmp_path):
    with running(leave_early, size=3, folder=tmp_path) as ranks:
        (first, first_err), (own, own_err), (last, last_err) = [end_of(process) for process in ranks.processes]
    assert (first, own, last) == (1, 0, 1), own_err
    for err in (first_err, last_err):
        assert "RankError: ranks: every rank must make the same calls until its end, got the end of rank 1" in err


LOST = [(0, signal.SIGKILL, False, 2), (1, signal.SIGKILL, True, 3), (0, signal.SIGSTOP, False, 2)]


def test_a_rank_that_is_killed_or_stopped_is_named_by_the_others(tmp_path):
    """Several jobs at once, and none hears of another's loss."""
    with contextlib.ExitStack() as jobs:
        started = [
            jobs.enter_context(running(lose_one, rank, how, fork, size=size, folder=tmp_path / str(i)))
            for i, (rank, how, fork, size) in enumerate(LOST)
        ]
        for ranks, (lost, *_) in zip(started, LOST, strict=True):
            said = f"rank {lost} (host {os.uname().nodename}, process {ranks.processes[lost].pid})"
            for process in ranks.processes[:lost] + ranks.processes[lost + 1 :]:
                code, err = end_of(process)
                assert code == 1, err
                assert "RankError: ranks: every rank must live as long as the run" in err
                assert said in err


def lose_signs_without_dying(folder):
    group = join_soon(1.0)
    if group.rank == 1:
        ctypes.PyDLL(None).usleep(1_300_000)  # holds the GIL, as a long call in C does
    group.barrier()
    (folder / f"stop{group.rank}").touch()
    time.sleep(1.4)
    group.barrier()
    return "lives"


def test_a_busy_rank_and_a_job_that_is_stopped_are_not_taken_for_dead(tmp_path):
    with running(lose_signs_without_dying, tmp_path, size=2, folder=tmp_path) as ranks:
        limit = time.monotonic() + IN_TIME_S
        while not all((tmp_path / f"stop{r}").exists() for r in range(2)):
            assert time.monotonic() < limit, "a rank that holds the GIL was taken for dead"
            time.sleep(0.02)
        for process in ranks.processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(1.2)
        for process in ranks.processes:
            process.send_signal(signal.SIGCONT)
        assert ranks.results() == ["lives"] * 2
    assert ranks.said == ["", ""]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def compare_and_log():
    assert joined() is None
    group = join_soon()
    assert joined() is group
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
    assert "parameters must be the same on all ranks, got ['weight'][0][1]: 3 on rank 0; 4 on rank 1" in error


@pytest.mark.parametrize(
    ("values", "difference"),
    [
        ([1, 1, 1], None),
        ([1, 2, 1], "1 on ranks 0, 2; 2 on rank 1"),
        ([1, True], "1 on rank 0; True on rank 1"),
        ([[1, 2], [1, 2, 3]], "[1, 2] on rank 0; [1, 2, 3] on rank 1"),
        ([[1, 2], [0, 2, 3]], "[0]: 1 on rank 0; 0 on rank 1"),
        ([{"a": 1, "b": (2,)}, {"a": 1, "b": (3,)}], "['b'][0]: 2 on rank 0; 3 on rank 1"),
        ([{"a": 1}, {"b": 1}], "{'a': 1} on rank 0; {'b': 1} on rank 1"),
        (["x" * 500, "y"], f"'{'x' * 119}… on rank 0; 'y' on rank 1"),
    ],
)
def test_the_first_difference_is_named(values, difference):
    assert find_difference(values) == difference


def be_rank_of_multiprocessing(rank, late, port):
    os.environ.update(environment(rank, 2, port))
    group = join_soon()
    if rank == late:
        time.sleep(1.0)  # the other one has ended
    with group.telling():
        dist.destroy_process_group()


def start_by_multiprocessing():
    context = multiprocessing.get_context("fork")
    calls = [(rank, late, port) for late, port in enumerate([free_port(), free_port()]) for rank in range(2)]
    processes = [context.Process(target=be_rank_of_multiprocessing, args=call) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def test_a_rank_that_ends_before_another_says_goodbye_also_where_atexit_calls_nothing(tmp_path):
    assert run_ranks(start_by_multiprocessing, size=1, folder=tmp_path) == [[0] * 4]
