"""What torchrun is told, and what its endings come to."""

import signal

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from everygpu.cli.script import OPTIONS, launch, torchrun_arguments


def parse(*arguments, **options):
    return run.parse_args(torchrun_arguments(*arguments, **options))


def test_several_machines_meet_by_c10d():
    parsed = parse(4, {"--nnodes": "2", "--rdzv-endpoint": "first:29400"}, "dir/train.py", ["--nnodes", "9"])
    assert (parsed.standalone, parsed.nproc_per_node, parsed.nnodes) == (False, "4", "2")
    assert (parsed.rdzv_backend, parsed.rdzv_endpoint, parsed.rdzv_id) == ("c10d", "first:29400", "train.py")
    assert parsed.training_script_args == ["--rank", "dir/train.py", "--nnodes", "9"]


def test_other_ways_to_meet_are_torchruns():
    parsed = parse(4, {"--nnodes": "2", "--master-addr": "first", "--node-rank": "1"}, "train.py", [])
    assert (parsed.rdzv_backend, parsed.master_addr, parsed.node_rank) == ("static", "first", 1)
    assert parse(4, {"--nnodes": "2", "--rdzv-id": "7"}, "train.py", []).rdzv_id == "7"


def test_options_are_torchruns_own():
    known = {name for action in run.get_args_parser()._actions for name in action.option_strings}
    assert set(OPTIONS) <= known


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
    assert launch(["train.py"]) == (code, words)
