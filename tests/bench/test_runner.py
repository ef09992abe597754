"""Processes that fail, hang, or leave others behind; and rows that are there already."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from everygpu.bench import runner
from everygpu.bench.runner import KEY, Results, measure_rows, read_results, run_command
from everygpu.errors import OptionError


def python(code):
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "row"),
    [
        ("print('noise'); print('{\"ms\": 3}')", {"ms": 3}),
        ("import os; os._exit(7)", {"error": "ended with exit code 7"}),
        ("import sys; sys.stdout.buffer.write(b'caf\\xe9\\n'); print('{\"ms\": 3}')", {"ms": 3}),
        ("import os; os.write(2, b'caf\\xe9'); os._exit(1)", {"error": "caf\\xe9"}),
    ],
)
def test_the_last_line_is_the_row(code, row):
    assert run_command(python(code), 60) == row


def test_a_failure_is_a_row():
    assert run_command(python("raise ValueError('mine')"), 60)["error"].endswith("ValueError: mine")


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
FORK = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_dead(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


@LINUX
@pytest.mark.parametrize(
    ("then", "limit_s", "row"),
    [("child.wait()", 1.5, {"error": "no result in 1.5 s"}), ("print('{\"ms\": 3}')", 300, {"ms": 3})],
)
def test_no_process_is_left_behind_or_waited_for(tmp_path, then, limit_s, row):
    note = tmp_path / "pid"
    begin = time.monotonic()
    assert run_command(python(f"{FORK} open({str(note)!r}, 'w').write(str(child.pid)); {then}"), limit_s) == row
    assert time.monotonic() - begin < 120
    wait_for(lambda: is_dead(note.read_text()))


@LINUX
def test_a_signal_in_the_midst_of_a_start_leaves_no_process_behind(monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self.pid)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # handlers run by now

    monkeypatch.setattr("everygpu.bench.runner.subprocess.Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_command(python("import time; time.sleep(600)"), 60)
    assert is_dead(started[0])


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_ends_the_row_too(tmp_path, number, expected):
    note = tmp_path / "pid"
    code = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    def interrupt():
        wait_for(lambda: note.exists() and note.read_text())
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(expected):
        run_command(python(code), 60)
    assert signal.getsignal(signal.SIGTERM) is before
    thread.join(60)
    wait_for(lambda: is_dead(note.read_text()))  # it has been ended, and may not have been taken note of


def key(way, **changed):
    return {**dict.fromkeys(KEY), "commit": "a", "card": "CPU", "model": "m", "way": way, **changed}


@pytest.fixture
def outcomes(monkeypatch):
    """Pretend what comes of each row; return those that were asked for, with their time limits."""
    asked = []

    def install(answers):
        def run(command, timeout):
            way = json.loads(command[-1])["way"]
            asked.append((way, timeout))
            return dict(answers[way])

        monkeypatch.setattr(runner, "run_command", run)
        return asked

    return install


def test_a_later_call_goes_on(outcomes, tmp_path):
    path = tmp_path / "rows.jsonl"
    asked = outcomes({"bare": {"ms": 2.0}, "ddp": {"error": "mine"}, "step": {"ms": 1.0}})

    def measure(*keys):
        return list(measure_rows(keys, Results(path), {}, 7.0, 1e9))

    assert [row.get("ms") for row in measure(key("bare"), key("ddp"))] == [2.0, None]
    assert [row.get("ms") for row in measure(key("bare"), key("ddp"), key("step"))] == [2.0, None, 1.0]
    measure(key("bare", commit="b"), key("bare", card="another"))
    assert asked == [(way, 7.0) for way in ("bare", "ddp", "step", "bare", "bare")]
    assert [row["way"] for row in read_results(path)] == ["bare", "ddp", "step", "bare", "bare"]


def test_what_the_limit_cuts_off_is_left_to_the_next_call(outcomes, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    asked = outcomes({"bare": {"ms": 2.0}, "ddp": {"error": "no result"}})
    results = Results(None)
    rows = measure_rows([key("bare"), key("ddp"), key("step")], results, {}, 300.0, 400.0)
    assert next(rows)["ms"] == 2.0
    run = runner.run_command

    def use_all(command, timeout):
        now[0] += timeout
        return run(command, timeout)

    now[0] = 150.0
    monkeypatch.setattr(runner, "run_command", use_all)
    assert list(rows) == []
    assert asked == [("bare", 300.0), ("ddp", 250.0)]
    assert [row["way"] for row in results.rows] == ["bare"]


def test_a_model_that_cannot_be_made_ends_it(outcomes):
    outcomes({"bare": {"refused": "mine"}})
    with pytest.raises(OptionError, match="mine"):
        list(measure_rows([key("bare")], Results(None), {}, 300.0, 1e9))
