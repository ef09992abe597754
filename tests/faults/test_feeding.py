"""Loaders that die, stop and are interrupted: an error that says so, soon, and nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import multiprocessing
from torch.utils.data import DataLoader, Dataset

from everygpu import Feeder
from everygpu.errors import FeedTimeoutError, WorkerError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sends signals, and reads /proc")


class Faulty(Dataset):
    """Item ``at`` does something to its own worker process."""

    def __init__(self, do, at):
        self.do, self.at = do, at

    def __len__(self):
        return 100

    def __getitem__(self, i):
        if i == self.at:
            self.do()
        return torch.full((2,), float(i))


def kill_oneself():
    os.kill(os.getpid(), signal.SIGKILL)


def stop_oneself():
    os.kill(os.getpid(), signal.SIGSTOP)


def exit_at_once():
    os._exit(3)


def drain(feeder):
    """Iterate until an error, noting the batches and the seconds that the last one took.

    A worker that dies or stops takes along what it has not handed over: no batch after the second can come.
    """
    seen, start = [], time.monotonic()
    try:
        for x in feeder:
            seen.append(x[0, 0].item())
            start = time.monotonic()
    finally:
        drain.seconds = time.monotonic() - start
        assert seen == [0, 2][: len(seen)]


def assert_nothing_left():
    assert not multiprocessing.active_children()
    assert not [t for t in threading.enumerate() if t.name == "everygpu-feeder"]


def loader_of(do, **options):
    options = {"num_workers": 1, "batch_size": 2, **options}
    return DataLoader(Faulty(do, at=5), **options)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"persistent_workers": True}], ids=str)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_killed_worker_is_a_typed_error(options, prefetch):
    feeder = Feeder(loader_of(kill_oneself, **options), ["cpu"] * 2, prefetch=prefetch)
    with pytest.raises(WorkerError, match=r"died: pid \d+ with exit code -9\. -9 is the kernel's out-of-memory killer"):
        drain(feeder)
    assert_nothing_left()


@pytest.mark.slow  # on a machine that does nothing else
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_killed_worker_is_noticed_within_two_seconds(prefetch):
    with pytest.raises(WorkerError):
        drain(Feeder(loader_of(kill_oneself), ["cpu"] * 2, prefetch=prefetch))
    assert drain.seconds < 2


def test_a_worker_killed_while_the_loop_computes():
    loader = DataLoader(Faulty(None, at=-1), batch_size=2, num_workers=2, prefetch_factor=1)
    feed = iter(Feeder(loader, "cpu", prefetch=1))
    next(feed)
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)
    time.sleep(0.3)  # torch would raise here, wherever the loop is
    with pytest.raises(WorkerError, match="exit code -9"):
        list(feed)
    assert_nothing_left()


def test_a_worker_that_exits():
    with pytest.raises(WorkerError, match=r"with exit code 3\..* num_workers=0 shows"):
        drain(Feeder(loader_of(exit_at_once), "cpu"))
    assert_nothing_left()


def test_the_loader_can_be_used_again():
    loader = loader_of(kill_oneself, persistent_workers=True)
    feeder = Feeder(loader, "cpu")
    for _ in range(2):
        with pytest.raises(WorkerError):
            drain(feeder)
        assert_nothing_left()


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"persistent_workers": True}], ids=str)
def test_a_stopped_worker_is_a_timeout(options):
    feed = iter(Feeder(loader_of(stop_oneself, **options), ["cpu"] * 2, timeout=0.7))
    while not any("stopped" in state_of(worker.pid) for worker in multiprocessing.active_children()):
        time.sleep(0.01)
    with pytest.raises(FeedTimeoutError, match=r"no batch came within timeout=0\.7 s\. .* worker processes: pid \d+"):
        drain(feed)
    assert drain.seconds >= 0.7
    assert_nothing_left()


def test_a_worker_that_is_stopped_between_two_epochs_is_a_timeout_and_others_begin():
    loader = DataLoader(Faulty(None, at=-1), batch_size=50, num_workers=2, persistent_workers=True)
    feeder = Feeder(loader, "cpu", timeout=0.7)
    assert len(list(feeder)) == 2
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGSTOP)
    with pytest.raises(FeedTimeoutError, match=r"no batch came within timeout=0\.7 s\. .* worker processes: pid \d+"):
        iter(feeder)
    assert_nothing_left()
    assert len(list(feeder)) == 2
    feeder.close()


def test_a_worker_that_dies_as_an_epoch_begins():
    loader = DataLoader(Faulty(None, at=-1), batch_size=50, num_workers=2, persistent_workers=True)
    feeder = Feeder(loader, "cpu")
    assert len(list(feeder)) == 2
    worker = multiprocessing.active_children()[0]
    os.kill(worker.pid, signal.SIGSTOP)
    killing = threading.Timer(0.3, worker.kill)
    killing.start()
    with pytest.raises(WorkerError, match="exit code -9"):
        iter(feeder)
    killing.join()
    assert_nothing_left()
    assert len(list(feeder)) == 2
    feeder.close()


def test_leaving_the_loop_with_a_stopped_worker(monkeypatch):
    monkeypatch.setattr("everygpu.feed.feeder_iterator.GRACE_S", 0.3)
    loader = DataLoader(Faulty(None, at=-1), batch_size=2, num_workers=1)
    feed = iter(Feeder(loader, "cpu"))
    next(feed)
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGSTOP)
    feed.close()
    assert_nothing_left()


def test_a_slow_loader_without_workers_is_a_timeout():
    feeds = []

    def load():
        yield torch.ones(2, 1)
        while not feeds or not feeds[0]._ahead.stop.is_set():
            time.sleep(0.01)

    feed = iter(Feeder(load(), "cpu", timeout=0.2))
    feeds.append(feed)
    next(feed)
    with pytest.raises(FeedTimeoutError, match="no worker processes"):
        next(feed)
    assert_nothing_left()


def test_a_batch_in_time_is_none():
    loader = DataLoader(Faulty(lambda: time.sleep(0.3), at=5), batch_size=2, num_workers=1)
    assert len(list(Feeder(loader, "cpu", timeout=60))) == 50


SCRIPT = """
import itertools, os, signal, sys, threading, time
import torch, everygpu
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, i):
        {item}
        return torch.full((2,), float(i))

model = everygpu.DataParallel(torch.nn.Linear(2, 2), ["cpu"] * 2)
feeder = everygpu.Feeder(DataLoader(Data(), batch_size=2, num_workers=2), model)

def train():
    for i, x in enumerate(feeder):
        model(x).sum().backward()
        if i == 2:
            pids = [p.pid for p in torch.multiprocessing.active_children()]
            print(*pids, flush=True)

try:
    train()
except KeyboardInterrupt:
    pass
print("threads", *(t.name for t in threading.enumerate() if "feeder" in t.name), flush=True)
raise KeyboardInterrupt
"""


def start(script, tmp_path, *command):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *command, str(path)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
    )


def state_of(pid):
    try:
        return Path(f"/proc/{pid}/status").read_text().partition("State:")[2].partition("\n")[0]
    except OSError:
        return "zombie"


def is_running(pid):
    return "zombie" not in state_of(pid)


def interrupt(process, times, whole_group):
    """Press Ctrl-C once or twice; return the workers' pids, the exit code, and what was printed."""
    workers = [int(pid) for pid in process.stdout.readline().split()]
    for i in range(times):
        if i:
            time.sleep(0.05)
        if process.poll() is None:
            (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return workers, process.returncode, out, err


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("whole_group", [True, False], ids=["terminal", "kill"])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_no_thread_and_no_worker(tmp_path, times, whole_group):
    process = start(SCRIPT.format(item="pass"), tmp_path, "-m", "everygpu", "run", "--cpu")
    workers, code, out, err = interrupt(process, times, whole_group)
    assert len(workers) == 2
    assert code in ({130} if times == 1 else {130, -signal.SIGINT}), err  # a shell shows both as 130
    if times == 1:
        assert out.strip() == "threads", err
        assert "KeyboardInterrupt" in err
    assert not any(is_running(pid) for pid in workers)
    assert "Fatal Python error" not in err


@pytest.mark.usefixtures("warm_python")
def test_ctrl_c_while_waiting_for_a_slow_loader(tmp_path):
    item = "time.sleep(0 if i < 20 else 600)"
    process = start(SCRIPT.format(item=item), tmp_path, "-m", "everygpu", "run", "--cpu")
    workers, code, out, err = interrupt(process, 1, whole_group=True)
    assert code == 130, err
    assert out.strip() == "threads", err
    assert not any(is_running(pid) for pid in workers)


@pytest.mark.usefixtures("warm_python")
def test_without_everygpu_run(tmp_path):
    process = start(SCRIPT.format(item="pass"), tmp_path)
    workers, code, out, err = interrupt(process, 1, whole_group=True)
    assert code == -signal.SIGINT, err  # which a shell shows as 130
    assert out.strip() == "threads", err
    assert not any(is_running(pid) for pid in workers)


@pytest.mark.usefixtures("warm_python")
def test_a_script_that_ends_within_a_pass_ends(tmp_path):
    script = """
        import itertools, torch, everygpu
        feed = iter(everygpu.Feeder(itertools.repeat(torch.ones(2)), "cpu"))
        next(feed)
        print("end", flush=True)
    """
    process = start(script, tmp_path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "end\n", "")
