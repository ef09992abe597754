"""Times, and processes that fail, hang, or leave others behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from everygpu.bench.timing import run_command, time_rounds


def python(code):
    return [sys.executable, "-c", code]


def test_a_step_takes_as_long_as_it_takes():
    calls, waits = [], []

    def step():
        begin = time.perf_counter()
        time.sleep(0.01)
        calls.append(1000 * (time.perf_counter() - begin))

    row = time_rounds(step, lambda: waits.append(len(calls)), rounds=3, steps=2)
    assert 10 <= row["ms_min"] <= row["ms"] <= row["ms_max"]
    assert row["ms_min"] < 2 * max(calls)
    assert waits == [5, 7, 9, 11]


def test_the_last_line_is_the_row():
    assert run_command(python("print('noise'); print('{\"ms\": 3}')"), 60) == {"ms": 3}


def test_a_failure_is_a_row():
    assert run_command(python("raise ValueError('mine')"), 60)["error"].endswith("ValueError: mine")
    assert run_command(python("import os; os._exit(7)"), 60) == {"error": "ended with exit code 7"}


def test_any_bytes_may_be_printed():
    code = "import sys; sys.stdout.buffer.write(b'caf\\xe9\\n'); print('{\"ms\": 3}')"
    assert run_command(python(code), 60) == {"ms": 3}
    assert run_command(python("import os; os.write(2, b'caf\\xe9'); os._exit(1)"), 60) == {"error": "caf\\xe9"}


FORK = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_hang_is_a_row_and_leaves_no_process_behind(tmp_path):
    note = tmp_path / "pid"
    code = f"{FORK} open({str(note)!r}, 'w').write(str(child.pid)); child.wait()"
    begin = time.monotonic()
    assert run_command(python(code), 1.5) == {"error": "no result in 1.5 s"}
    assert time.monotonic() - begin < 60
    deadline = time.monotonic() + 60
    while is_alive(note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(note.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_process_that_is_left_behind_is_not_waited_for(tmp_path):
    note = tmp_path / "pid"
    code = f"{FORK} open({str(note)!r}, 'w').write(str(child.pid)); print('{{\"ms\": 3}}')"
    assert run_command(python(code), 300) == {"ms": 3}
    deadline = time.monotonic() + 60
    while is_alive(note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(note.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_signal_in_the_midst_of_a_start_leaves_no_process_behind(tmp_path, monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self.pid)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # handlers run by now

    monkeypatch.setattr("everygpu.bench.timing.subprocess.Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_command(python("import time; time.sleep(600)"), 60)
    assert not is_alive(started[0])


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_ends_the_row_too(tmp_path, number, expected):
    note = tmp_path / "pid"
    code = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    def interrupt():
        while not (note.exists() and note.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(expected):
        run_command(python(code), 60)
    assert signal.getsignal(signal.SIGTERM) is before
    thread.join()
    deadline = time.monotonic() + 60  # it has been ended, and may not have been taken note of
    while is_alive(note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(note.read_text())
