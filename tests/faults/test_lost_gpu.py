"""After an error that means a lost GPU a process makes no further CUDA call, keeps its saves, and ends with 6."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import everygpu
from everygpu._watchdog import explain_lost_gpu
from everygpu.errors import ReplicaError
from everygpu.exit_codes import STUCK
from everygpu.progress import progress
from tests.cli.runs import command_of


def error_of(code: int | None) -> BaseException:
    error = torch.AcceleratorError("CUDA error: unspecified launch failure")
    if code is not None:
        error.error_code = code
    return error


def test_errors_of_a_lost_gpu_are_told_from_others() -> None:
    for code in (46, 214, 700, 719, 999):
        assert str(explain_lost_gpu(error_of(code))).startswith(
            f"This process has lost a GPU: CUDA error {code}. Start again"
        )
    for error in (error_of(1), error_of(2), error_of(710), error_of(720), error_of(None), RuntimeError(), ValueError()):
        assert explain_lost_gpu(error) is None


def test_the_replica_is_named_wherever_the_error_is_in_the_chain() -> None:
    error = error_of(719)
    error.__cause__ = ReplicaError("forward: replica 1 on cuda:1 failed, called with args[0] (2, 4).")
    outer = KeyError("of the script")
    outer.__context__ = error
    error.__cause__.__context__ = outer
    assert "lost a GPU: CUDA error 719, in replica 1 on cuda:1. Start" in str(explain_lost_gpu(outer))


LOSES_A_GPU = """
import atexit, sys, time, torch, everygpu

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.code = torch.nn.Parameter(torch.zeros(1 << 20)), None
    def forward(self, x):
        if self.code is not None and x[0] == 1:
            error = torch.AcceleratorError("CUDA error: unspecified launch failure")
            error.error_code = self.code
            raise error
        return x * self.weight[0]
    def __del__(self):
        print("destroyed")

def never(*_):
    print("a call of CUDA's")

torch.cuda.synchronize = torch.cuda.empty_cache = never
atexit.register(print, "ended")
model = Model()
parallel = everygpu.DataParallel(model, ["cpu"] * 2, engine="threads")
checkpoints = everygpu.CheckpointManager("run", every=1, asynchronous=True, model=model)
checkpoints.save(1)
model.code = int(sys.argv[1])
if len(sys.argv) > 2:
    try:
        parallel(torch.arange(2.0))
    except torch.AcceleratorError:
        print("caught")
else:
    parallel(torch.arange(2.0))
"""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["719"], STUCK),
        pytest.param(["710"], 1, marks=pytest.mark.slow),
        pytest.param(["719", "caught"], 0, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_loses_a_gpu(tmp_path: Path, args: list[str], code: int) -> None:
    (tmp_path / "train.py").write_text(LOSES_A_GPU)
    asked = command_of("run", "--cpu", "train.py", *args)
    done = subprocess.run(**asked, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == code, done.stderr
    everygpu.load(tmp_path / "run", model=(restored := torch.nn.ParameterDict({"weight": torch.ones(1 << 20)})))
    assert restored["weight"].count_nonzero() == 0
    if code == STUCK:
        assert done.stdout == ""
        trace, _, said = done.stderr.partition("everygpu: This process has lost a GPU: CUDA error 719, ")
        assert "ReplicaError: forward: replica 1 on cpu failed" in trace
        assert said.startswith("in replica 1 on cpu. Start again from the newest checkpoint")
    else:
        assert "ended" in done.stdout
        assert "lost a GPU" not in done.stderr


def test_the_hook_of_the_script_is_called_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    own = lambda kind, error, trace: shown.append(error)  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", own)
    with everygpu.watchdog():
        error = ValueError()
        sys.excepthook(ValueError, error, None)
        assert shown == [error]
    assert sys.excepthook is own
    with everygpu.watchdog():
        ours = sys.excepthook
        sys.excepthook = lambda *given: ours(*given)  # as that of ranks does
    with everygpu.watchdog():
        sys.excepthook(ValueError, error, None)
        assert shown == [error, error]
    sys.excepthook = ours
    with everygpu.watchdog():
        pass
    assert sys.excepthook is own
    assert not progress().is_watched


TRAPS = """
import torch, everygpu
everygpu.watchdog()
x = torch.ones(8, device="cuda")


class Beyond:
    __cuda_array_interface__ = {"shape": (1 << 42,), "typestr": "|u1", "data": (x.data_ptr(), False), "version": 3}


(torch.as_tensor(Beyond(), device="cuda")[1 << 41 :][:8] + 1).cpu()
"""


@pytest.mark.gpu
@pytest.mark.alone
def test_an_illegal_access_ends_a_run(tmp_path: Path) -> None:
    """What is nearest to a lost GPU and can be done to one that others use: the context is lost, the GPU isn't."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    (tmp_path / "train.py").write_text(TRAPS)
    path = str(Path(__file__).parents[2] / "src")
    asked = [sys.executable, "train.py"]
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(asked, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == STUCK, done.stderr
    assert "This process has lost a GPU: CUDA error 700" in done.stderr
