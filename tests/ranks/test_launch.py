"""One process a GPU from a notebook."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import everygpu
from everygpu.errors import DeviceError, OptionError, RankError
from everygpu.ranks.group import init_group

pytestmark = pytest.mark.usefixtures("warm_python")

CELL = """
import torch, everygpu

def train(scale):
    torch.manual_seed(0)
    model = everygpu.DataParallel(torch.nn.Linear(2, 1), ["cpu"])
    rank = model.rank_model.group.rank
    x = torch.arange(6.0).view(3, 2) * scale
    model(x[:2] if rank == 0 else x[2:]).mean().backward()
    return rank, model.module.weight.grad
"""


def test_a_function_of_a_cell_trains_twice_in_one_kernel():
    cell = {"__name__": "__main__"}
    exec(CELL, cell)
    for scale in (1.0, 2.0):
        torch.manual_seed(0)
        net = nn.Linear(2, 1)
        net(torch.arange(6.0).view(3, 2) * scale).mean().backward()
        ranks = everygpu.launch(cell["train"], scale, processes=2)
        assert [rank for rank, _ in ranks] == [0, 1]
        for _, grad in ranks:
            torch.testing.assert_close(grad, net.weight.grad)


def fail(how):
    group = init_group()
    if group.rank == 1 and how == "raise":
        raise ZeroDivisionError("the model of rank 1")
    if group.rank == 1 and how == "exit":
        sys.exit(0)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.gather(None)


def test_the_rank_that_fails_is_named():
    with pytest.raises(RankError, match=r"(?s)Rank 1 failed, .*ZeroDivisionError: the model of rank 1"):
        everygpu.launch(fail, "raise", processes=2)
    with pytest.raises(RankError, match=r"(?s)Rank 1 failed, .*SIGKILL"):
        everygpu.launch(fail, "kill", processes=2)
    with pytest.raises(RankError, match=r"^Rank 1 has ended by itself, as by sys.exit\(0\). Have the function return"):
        everygpu.launch(fail, "exit", processes=2)


SCRIPT = """
import os, sys, time, everygpu
def wait():
    os.write(1, f"begun {{os.getpid()}}\\n".encode())
    time.sleep(600)
{}everygpu.launch(wait, processes=2)
"""


def started(tmp_path, guard):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(guard))
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    return subprocess.Popen(
        [sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )


def test_ctrl_c_for_the_parent_alone_ends_the_ranks(tmp_path):
    parent = started(tmp_path, "if __name__ == '__main__': ")
    pids = [int(parent.stdout.readline().split()[1]) for _ in range(2)]
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=60)
    assert parent.returncode == -signal.SIGINT, said
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_a_script_without_its_main_line_is_told_so(tmp_path):
    _, said = started(tmp_path, "").communicate(timeout=120)
    message = "Rank [01] has ended before it began, with exit code 1: each process imports the script first"
    assert re.search(f"RankError: {message}", said), said  # whichever was sooner


def test_bad_calls(monkeypatch):
    with pytest.raises(OptionError, match="processes must be 1 or more"):
        everygpu.launch(fail, processes=0)
    with pytest.raises(OptionError, match="picklable"):
        everygpu.launch(fail, (x for x in "a"), processes=1)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no GPU found. Pass processes=2"):
            everygpu.launch(fail)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(OptionError, match="one of several processes already"):
        everygpu.launch(fail, processes=2)
