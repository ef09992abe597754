"""The test's process: what is made of what it says, of its silence, and of its end."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from everygpu.child import python_command
from everygpu.devices import p2p
from everygpu.devices.p2p import MODULE, PairReport, examine

SRC = str(Path(p2p.__file__).parents[2])
RIGHT = PairReport(verdict="right")
UNTESTED = PairReport(verdict="untested")
HANGS = PairReport(verdict="hangs", detail="no answer")


def run(*steps, num_devices=2, limit_s=60, **options):
    """Examine a process that says lines, and runs code between them."""
    lines = [step if isinstance(step, str) else f"print({json.dumps(step)!r}, flush=True)" for step in steps]
    command = [sys.executable, "-S", "-c", "import os, sys, time\n" + "\n".join(lines)]
    return examine(command, {}, num_devices, limit_s, **options)


READY, DONE = {"ready": [0, 1]}, {"done": True}
HANG = "import faulthandler; faulthandler.dump_traceback_later(0.1, exit=True, file=1); time.sleep(100)"


def begin(source, target):
    return {"begin": [source, target]}


def pair(source, target, wrong=None, speed=None):
    return {"pair": [source, target], "wrong": wrong, "gigabytes_per_s": speed}


def test_all_right():
    outcome = run(READY, begin(0, 1), pair(0, 1, speed=390.5), begin(1, 0), pair(1, 0), DONE)
    assert outcome.pairs == {(0, 1): PairReport(verdict="right", gigabytes_per_s=390.5), (1, 0): RIGHT}
    assert outcome.collective == UNTESTED


def test_wrong_bytes_in_one_direction():
    outcome = run(READY, begin(0, 1), pair(0, 1), begin(1, 0), pair(1, 0, wrong="bfloat16 by a kernel"), DONE)
    assert outcome.pairs[0, 1] == RIGHT
    assert outcome.pairs[1, 0] == PairReport(verdict="wrong", detail="bfloat16 by a kernel")


@pytest.mark.parametrize(("hang", "limit_s"), [(HANG, 60), ("time.sleep(100)", 0.5)])
def test_hanging_pair_is_named_and_the_process_ended(hang, limit_s):
    ready = {"ready": [0, 1, 2]}
    outcome = run(ready, begin(0, 1), pair(0, 1), begin(1, 0), hang, num_devices=3, limit_s=limit_s)
    assert outcome.pairs[2, 1] in (UNTESTED, PairReport(verdict="hangs", detail="not tried any more"))
    if outcome.pairs[2, 1] != UNTESTED:  # a busy machine may not have started it in so short a time
        assert outcome.pairs[0, 1] == RIGHT
        assert outcome.pairs[1, 0] == HANGS
    assert limit_s < 60 or outcome.pairs[1, 0] == HANGS


def test_slow_start_is_no_verdict():
    assert set(run("time.sleep(100)", limit_s=0.3).pairs.values()) == {UNTESTED}


@pytest.mark.parametrize("ending", ["sys.exit(3)", "os._exit(3)"])
def test_death_in_the_middle_of_a_pair_is_a_fault(ending):
    outcome = run(READY, begin(0, 1), ending)
    assert outcome.pairs[0, 1] == PairReport(verdict="wrong", detail="the test ended with exit code 3")
    assert outcome.pairs[1, 0].verdict == "wrong"


def test_death_before_the_first_pair_is_no_verdict():
    assert set(run("sys.exit(3)").pairs.values()) == {UNTESTED}


def test_program_that_is_not_there_is_no_verdict():
    assert set(examine(["/no/such/python"], {}, 2, 60).pairs.values()) == {UNTESTED}


def test_devices_without_room_are_untested():
    ready = {"ready": [0, 2]}
    outcome = run(ready, begin(0, 2), pair(0, 2), begin(2, 0), pair(2, 0), DONE, num_devices=3)
    assert {p for p, report in outcome.pairs.items() if report == UNTESTED} == {(0, 1), (1, 0), (1, 2), (2, 1)}


def test_collective_hangs_or_is_wrong():
    steps = [READY, begin(0, 1), pair(0, 1), begin(1, 0), pair(1, 0), {"begin": "collective"}]
    outcome = run(*steps, HANG)
    assert outcome.collective == HANGS
    assert set(outcome.pairs.values()) == {RIGHT}
    outcome = run(*steps, {"collective": True, "wrong": "NCCL's sum on cuda:1"}, DONE)
    assert outcome.collective == PairReport(verdict="wrong", detail="NCCL's sum on cuda:1")


def test_what_others_write_to_the_stream_is_skipped():
    noise = ["print('hello')", "print('[1]')", "print('\\xff' * 9, file=sys.stderr)", "print(5)"]
    outcome = run(*noise, READY, *noise, begin(0, 1), pair(0, 1), begin(1, 0), pair(1, 0), *noise, DONE)
    assert set(outcome.pairs.values()) == {RIGHT}


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
    run(READY, begin(0, 1), "time.sleep(100)", limit_s=0.1)
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


@pytest.mark.parametrize(
    ("spoil", "limit", "report"),
    [
        ("", 60, RIGHT),
        (
            "target.view(torch.uint8).view(-1)[0] += 1",
            60,
            PairReport(verdict="wrong", detail="uint8 by the copy engine, 4104 bytes"),
        ),
        ("time.sleep(100)", 1, HANGS),
    ],
)
@pytest.mark.usefixtures("warm_python")
def test_real_test_with_transfers_that_corrupt_or_hang(spoil, limit, report):
    code = textwrap.dedent(REAL)
    command = [sys.executable, "-c", code.format(spoil=spoil, limit=limit)]
    assert examine(command, {"PYTHONPATH": SRC}, 2, 60).pairs[0, 1] == report


@pytest.mark.usefixtures("warm_python")
def test_module_runs_as_a_program():
    done = subprocess.run(python_command(MODULE, "0"), env={}, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"ready": []}, {"done": True}]
    assert done.stderr == ""
