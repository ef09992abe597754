"""What torchrun is told, and what its endings come to."""

import signal

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from everygpu.cli.launch import Launch, launch, pass_on


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    """Have what a launch sets for torchrun taken back."""
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "SIGTERM")


def test_alone_on_a_box():
    arguments = Launch(num_processes=2).arguments("dir/train.py", ["--lr", "1"])
    assert arguments == ["--standalone", "--nproc-per-node", "2", "dir/train.py", "--lr", "1"]


def test_arguments_are_understood_by_torchrun():
    plan = Launch(num_processes=4, nnodes="2", rdzv_endpoint="first:29400")
    parsed = run.parse_args(plan.arguments("train.py", ["--nnodes", "9"]))
    assert (parsed.nproc_per_node, parsed.nnodes, parsed.rdzv_endpoint) == ("4", "2", "first:29400")
    assert (parsed.training_script, parsed.training_script_args) == ("train.py", ["--nnodes", "9"])


def failure(exitcode):
    return ProcessFailure(local_rank=1, pid=99, exitcode=exitcode, error_file="none")


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        (None, 0, None),
        (ChildFailedError("train.py", {1: failure(7)}), 7, "process 1 ended with exit code 7."),
        (ChildFailedError("train.py", {1: failure(-9)}), 137, "process 1 ended with exit code -9."),
        (SignalException("x", signal.SIGINT), 130, "stopped by SIGINT; so were the processes."),
        (SignalException("x", signal.SIGTERM), 143, "stopped by SIGTERM; so were the processes."),
        (SignalException("x", signal.SIGUSR1), 143, "stopped by SIGUSR1; so were the processes."),
    ],
)
def test_endings(monkeypatch, ending, code, words):
    def main(arguments):
        if ending is not None:
            raise ending

    monkeypatch.setattr(run, "main", main)
    assert launch(Launch(num_processes=2), "train.py", []) == (code, words)


def test_other_errors_go_through(monkeypatch):
    monkeypatch.setattr(run, "main", lambda arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        launch(Launch(num_processes=2), "train.py", [])


def test_a_module():
    plan = Launch(num_processes=2, is_module=True)
    assert plan.arguments("package.train", ["-x"])[-4:] == ["2", "--module", "package.train", "-x"]


def test_options_of_torchruns_are_passed_on():
    options = pass_on({"--local-ranks-filter": "0", "--tee": None, "--log-dir": "logs", "--max-restarts": "2"})
    arguments = Launch(num_processes=2, passed_on=options).arguments("train.py", ["--tee", "x"])
    parsed = run.parse_args(arguments)
    assert (parsed.local_ranks_filter, parsed.tee, parsed.log_dir, parsed.max_restarts) == ("0", "0", "logs", 2)
    assert parsed.training_script_args == ["--tee", "x"]
