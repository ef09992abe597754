"""The test of copies in its process: what is made of what it says, of its silence, and of its end."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from everygpu.child import python_command
from everygpu.devices import p2p
from everygpu.devices.p2p import HANGING, MODULE, PairReport, examine, judge

SRC = str(Path(p2p.__file__).parents[2])
RIGHT = PairReport(verdict="right")
UNTESTED = PairReport(verdict="untested")
HANGS = PairReport(verdict="hangs", detail="no answer")
SKIPPED = PairReport(verdict="hangs", detail="not tried any more")


def state(*pairs, ready=(0, 1), now=None, collective=None):
    """Write a line of the test."""
    return json.dumps({"ready": ready, "pairs": pairs, "now": now, "collective": collective})


DONE = state((0, 1, None, 390.5), (1, 0, None, None))


def test_all_right():
    outcome = judge(f"{state(now=[0, 1])}\n{DONE}", "exit code 0", 2)
    assert outcome.pairs == {(0, 1): PairReport(verdict="right", gigabytes_per_s=390.5), (1, 0): RIGHT}
    assert outcome.collective == UNTESTED


def test_wrong_bytes_in_one_direction():
    outcome = judge(state((0, 1, None, None), (1, 0, "bfloat16 by a kernel", None)), "exit code 0", 2)
    assert outcome.pairs == {(0, 1): RIGHT, (1, 0): PairReport(verdict="wrong", detail="bfloat16 by a kernel")}


@pytest.mark.parametrize(("output", "ending"), [("", HANGING), (f"\n{HANGING}0:00:04)!", "exit code 1")])
def test_a_pair_that_hangs_is_named_and_those_after_it_count_for_no_better(output, ending):
    outcome = judge(state((0, 1, None, None), ready=[0, 1, 2], now=[1, 0]) + output, ending, 4)
    assert outcome.pairs[0, 1] == RIGHT
    assert outcome.pairs[1, 0] == HANGS
    assert outcome.pairs[2, 1] == SKIPPED
    assert outcome.pairs[2, 3] == UNTESTED


def test_an_end_in_the_middle_of_a_pair_is_a_fault():
    outcome = judge(state(now=[0, 1]), "exit code 3", 2)
    assert outcome.pairs[0, 1] == PairReport(verdict="wrong", detail="the test ended with exit code 3")
    assert outcome.pairs[1, 0].verdict == "wrong"


@pytest.mark.parametrize("ending", ["exit code 3", HANGING])
def test_an_end_before_the_first_pair_is_no_verdict(ending):
    assert set(judge("", ending, 2).pairs.values()) == {UNTESTED}


def test_devices_without_room_are_untested():
    pairs = judge(state((0, 2, None, None), (2, 0, None, None), ready=[0, 2]), "exit code 0", 3).pairs
    assert {pair for pair, report in pairs.items() if report == UNTESTED} == {(0, 1), (1, 0), (1, 2), (2, 1)}


def test_collective_hangs_or_is_wrong():
    pairs = (0, 1, None, None), (1, 0, None, None)
    outcome = judge(state(*pairs, now="collective"), HANGING, 2)
    assert outcome.collective == HANGS
    assert set(outcome.pairs.values()) == {RIGHT}
    outcome = judge(state(*pairs, collective=["NCCL's sum on cuda:1", None]), "exit code 0", 2)
    assert outcome.collective == PairReport(verdict="wrong", detail="NCCL's sum on cuda:1")


def test_what_others_write_to_the_stream_is_skipped():
    noise = 'hello\n[1]\n{"x": 1}\n5\n\xff\n'
    assert set(judge(f"{noise}{state(now=[0, 1])}\n{noise}{DONE}\n{noise}", "exit code 0", 2).pairs) == {(0, 1), (1, 0)}


def run(code, limit_s):
    return examine([sys.executable, "-S", "-c", f"import sys, time\n{code}"], {}, 2, limit_s)


def test_program_that_is_not_there_is_no_verdict():
    assert set(examine(["/no/such/python"], {}, 2, 60).pairs.values()) == {UNTESTED}


def test_slow_start_is_no_verdict():
    assert set(run("time.sleep(100)", 0.3).pairs.values()) == {UNTESTED}


def test_process_that_cannot_be_killed_does_not_hold_us_up(monkeypatch, caplog):
    processes = []

    class Stuck(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            processes.append(self)

        def kill(self):
            pass

    monkeypatch.setattr(subprocess, "Popen", Stuck)
    monkeypatch.setattr(p2p, "_END_S", 0.1)
    run("time.sleep(100)", 0.1)
    assert "can't be ended" in caplog.text
    (process,) = processes
    super(Stuck, process).kill()
    process.communicate()


REAL = """
    import sys, time, torch
    from everygpu.devices import peer_test

    def transfer(target, source):
        peer_test.copy(target, source)
        {spoil}

    peer_test.main(["2", "--limit", "{limit}"], [torch.device("cpu")] * 2, transfer)
"""
WRONG = PairReport(verdict="wrong", detail="uint8 by the copy engine, 4104 bytes")


@pytest.mark.parametrize(
    ("spoil", "limit", "report"),
    [("", 60, RIGHT), ("target.view(torch.uint8).view(-1)[0] += 1", 60, WRONG), ("time.sleep(100)", 0.3, HANGS)],
)
@pytest.mark.usefixtures("warm_python")
def test_real_test_with_transfers_that_corrupt_or_hang(spoil, limit, report):
    command = [sys.executable, "-c", textwrap.dedent(REAL).format(spoil=spoil, limit=limit)]
    assert examine(command, {"PYTHONPATH": SRC}, 2, 60).pairs[0, 1] == report


@pytest.mark.usefixtures("warm_python")
def test_module_runs_as_a_program():
    done = subprocess.run(python_command(MODULE, "0"), env={}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"ready": [], "pairs": [], "collective": None, "now": None}
    assert done.stderr == ""
