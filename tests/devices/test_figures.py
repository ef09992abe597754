"""Figures of runs: written by one process, read by another, gone with the run."""

import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from everygpu.devices import figures as module
from everygpu.devices.figures import Figures, Publisher, Run, read_runs

FIGURES = Figures(
    devices=("GPU-a", "GPU-b"),
    num_steps=100,
    steps_per_s=12.5,
    data_wait_pct=3.0,
    communication_pct=8.25,
    slowest_replica=1,
)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Publish where only this test reads."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "everygpu" / "figures"


class Clock:
    """Seconds that pass when they are told to."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


def publisher(**options):
    return Publisher("train.py", **options)


def test_what_is_published_is_read():
    source = publisher()
    source.publish(FIGURES)
    (run,) = read_runs()
    assert run == Run(pid=os.getpid(), command="train.py", figures=FIGURES, age_s=run.age_s)
    assert 0 <= run.age_s < 10
    source.close()
    assert read_runs() == []


def test_run_is_known_by_its_script_unless_it_says_otherwise(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dir/train.py", "--config", "large.py"])
    source = Publisher()
    source.publish(FIGURES)
    assert [run.command for run in read_runs()] == ["train.py"]
    source.close()


def test_what_is_not_measured_is_none():
    source = publisher()
    source.publish(Figures(devices=("cpu", "cpu"), num_steps=0))
    (run,) = read_runs()
    assert run.figures == Figures(devices=("cpu", "cpu"), num_steps=0)
    source.close()


def test_once_a_second_at_most(monkeypatch):
    clock, written = Clock(), []
    monkeypatch.setattr(module, "write_whole", lambda path, text: written.append(json.loads(text)))
    source = publisher(clock=clock)
    for step in range(40):
        clock.now_s = step / 10
        assert source.is_due == (step % 10 == 0)
        source.publish(Figures(devices=(), num_steps=step))
    assert [record["figures"]["num_steps"] for record in written] == [0, 10, 20, 30]
    source.close()


def test_several_in_one_process():
    sources = [publisher(), publisher()]
    for source in sources:
        source.publish(FIGURES)
    assert len(read_runs()) == 2
    sources[0].close()
    assert len(read_runs()) == 1
    sources[1].close()


def test_nothing_is_left(folder):
    source = publisher()
    source.publish(FIGURES)
    source.close()
    assert list(folder.iterdir()) == []
    source.publish(FIGURES)
    assert list(folder.iterdir()) == []


def test_dropped_publisher_withdraws(folder):
    source = publisher()
    source.publish(FIGURES)
    del source
    assert list(folder.iterdir()) == []


def another(ending):
    """Start a process that publishes, and says so; ``ending`` is what it does then."""
    code = textwrap.dedent("""
        import os, sys
        from everygpu.devices.figures import Publisher
        from tests.devices.test_figures import FIGURES
        source = Publisher("other.py")
        source.publish(FIGURES)
        print("published", flush=True)
        sys.stdin.readline()
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", code + ending], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "published\n"
    return process


def finish(process):
    process.communicate("go on\n")


def test_run_of_another_process_is_read_while_it_lives(folder):
    process = another("")
    (run,) = read_runs()
    assert (run.pid, run.command, run.figures) == (process.pid, "other.py", FIGURES)
    finish(process)
    assert list(folder.iterdir()) == []
    assert read_runs() == []


@pytest.mark.parametrize("ending", ["os._exit(1)", "os.kill(os.getpid(), 9)"])
def test_what_a_dead_run_leaves_is_not_read_and_is_removed(folder, ending):
    process = another(ending)
    finish(process)
    assert len(list(folder.iterdir())) == 2
    assert read_runs() == []
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_neither_publishes_nor_withdraws(folder):
    process = another("")
    process.kill()
    finish(process)
    read_runs()
    forking = another("os.fork() == 0 and sys.exit(); os.wait(); print('forked', flush=True); sys.stdin.readline()")
    forking.stdin.write("go on\n")
    forking.stdin.flush()
    assert forking.stdout.readline() == "forked\n"
    assert [run.pid for run in read_runs()] == [forking.pid]
    finish(forking)


def damage(path, change):
    record = json.loads(path.read_text())
    path.write_text(json.dumps(change(record)))


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record | {"format": 99},
        lambda record: {},
        lambda record: [],
        lambda record: record | {"figures": {}},
        lambda record: record | {"figures": record["figures"] | {"devices": 3}},
        lambda record: record | {"pid": "x"},
        lambda record: record | {"pid": 2**70},
        lambda record: record | {"written_s": 10**400},
        lambda record: record | {"written_s": []},
        lambda record: record | {"figures": record["figures"] | {"num_steps": "many"}},
        lambda record: record | {"figures": record["figures"] | {"num_steps": 1e999}},
        lambda record: record | {"figures": record["figures"] | {"steps_per_s": {}}},
        lambda record: record | {"figures": record["figures"] | {"data_wait_pct": "x"}},
        lambda record: record | {"figures": record["figures"] | {"slowest_replica": "x"}},
    ],
)
def test_file_that_is_not_understood_is_skipped(folder, change):
    source = publisher()
    source.publish(FIGURES)
    (path,) = folder.glob("*.json")
    damage(path, change)
    assert read_runs() == []
    source.close()


def test_figures_of_a_newer_version_may_have_more(folder):
    source = publisher()
    source.publish(FIGURES)
    (path,) = folder.glob("*.json")
    damage(path, lambda record: record | {"figures": record["figures"] | {"loss": 0.5}, "more": 1})
    assert [run.figures for run in read_runs()] == [FIGURES]
    source.close()


def test_readers_never_see_half_of_it():
    source = publisher(interval_s=0.0)
    source.publish(FIGURES)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            source.publish(FIGURES)

    thread = threading.Thread(target=write)
    thread.start()
    deadline = time.monotonic() + 0.3
    try:
        while time.monotonic() < deadline:
            assert [run.figures for run in read_runs()] == [FIGURES]
    finally:
        stop.set()
        thread.join()
        source.close()


def test_without_a_folder_it_says_so_once_and_does_nothing(monkeypatch, caplog):
    def refuse():
        raise PermissionError("read-only")

    monkeypatch.setattr(module, "runtime_folder", refuse)
    source = publisher(interval_s=0.0)
    source.publish(FIGURES)
    source.publish(FIGURES)
    assert read_runs() == []
    (record,) = caplog.records
    assert "read-only" in record.message
    source.close()


def test_full_disk_ends_publishing_with_one_line(monkeypatch, caplog, folder):
    def refuse(path, text):
        raise OSError(28, "No space left on device")

    caplog.set_level(logging.WARNING)
    source = publisher(interval_s=0.0)
    source.publish(FIGURES)
    monkeypatch.setattr(module, "write_whole", refuse)
    source.publish(FIGURES)
    source.publish(FIGURES)
    assert len(caplog.records) == 1
    assert read_runs() == []


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_number_that_says_nothing_is_none(folder, number):
    source = publisher()
    source.publish(Figures(devices=("cpu",), num_steps=1, steps_per_s=number))
    (run,) = read_runs()
    assert run.figures == Figures(devices=("cpu",), num_steps=1)
    source.close()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("suffix", [".json", ".lock"])
@pytest.mark.parametrize("make", [os.mkdir, getattr(os, "mkfifo", None), lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_neither_read_nor_waited_for(folder, make, suffix):
    sources = [publisher(), publisher()]
    for source in sources:
        source.publish(FIGURES)
    path = sorted(folder.glob(f"*{suffix}"))[0]
    path.unlink()
    make(path)
    assert len(read_runs()) == 1
    for source in sources:
        source.close()


def test_figures_of_another_user_are_not_read(folder, monkeypatch):
    source = publisher()
    source.publish(FIGURES)
    uid = os.geteuid()
    monkeypatch.setattr(module, "_folder", lambda: folder)
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert read_runs() == []
    monkeypatch.undo()
    assert len(list(folder.iterdir())) == 2
    source.close()


def test_text_without_end_is_skipped(folder):
    source = publisher()
    source.publish(FIGURES)
    (path,) = folder.glob("*.json")
    path.write_text("[" * 100_000)
    assert read_runs() == []
    source.close()
