"""Ctrl-C once ends a run with 130, twice ends it at once; no process and no thread of it is left."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import everygpu
from tests.cli.runs import command_of

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX signals"),
    pytest.mark.usefixtures("warm_python"),
]

SCRIPT = """
import os, sys, time
import torch
import everygpu
from torch.utils.data import DataLoader

def slowly(descriptor, fsync=os.fsync):
    print("writes", flush=True)
    time.sleep(float(sys.argv[1]))
    fsync(descriptor)

os.fsync = slowly
net = torch.nn.Linear(2, 1)
model = everygpu.DataParallel(net, ["cpu"] * 2)
loader = DataLoader(torch.ones(10_000, 2), 4, num_workers=2, multiprocessing_context="fork")
with everygpu.CheckpointManager("run", asynchronous=True, model=model) as checkpoints:
    try:
        for step, x in enumerate(everygpu.Feeder(loader, model), 1):
            model(x).sum().backward()
            if step == 3:
                checkpoints.save(step)
                print("trains", flush=True)
            time.sleep(0.001)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise
"""


@contextmanager
def training(folder: Path, write_s: float) -> Iterator["subprocess.Popen[str]"]:
    """Train in a session of its own, as a terminal has it; every file takes its time to write."""
    (folder / "train.py").write_text(SCRIPT)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    process = subprocess.Popen(**command_of("run", "--cpu", "train.py", write_s), cwd=folder, **pipes)
    try:
        assert {process.stdout.readline(), process.stdout.readline()} == {"writes\n", "trains\n"}
        yield process
    finally:
        if not is_gone(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def is_gone(group: int) -> bool:
    """Whether no process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until_gone(group: int) -> None:
    limit = time.monotonic() + 60
    while not is_gone(group):
        assert time.monotonic() < limit, "a worker is left"
        time.sleep(0.005)


def test_once_ends_the_run_when_its_checkpoint_is_written(tmp_path: Path) -> None:
    with training(tmp_path, write_s=0.05) as process:
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130
        assert said.rstrip().endswith("KeyboardInterrupt")
        assert is_gone(process.pid)
    assert everygpu.load(tmp_path / "run", rng=True)["step"] == 3


def test_twice_ends_it_at_once(tmp_path: Path) -> None:
    with training(tmp_path, write_s=600.0) as process:
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"  # two at once would be one
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == -signal.SIGINT  # 130 in a shell
        wait_until_gone(process.pid)


def test_a_block_that_ctrl_c_leaves_doesnt_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_left, real = threading.Event(), os.fsync

    def fsync(descriptor: int) -> None:
        assert is_left.wait(60), "the block waits for its save"
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    checkpoints = everygpu.CheckpointManager(tmp_path / "run", asynchronous=True, model=torch.nn.Linear(1, 1))
    checkpoints.save(1)
    with pytest.raises(KeyboardInterrupt), checkpoints:
        raise KeyboardInterrupt
    is_left.set()
    checkpoints.close()
    assert everygpu.load(tmp_path / "run", model=torch.nn.Linear(1, 1)) == {"step": 1}
