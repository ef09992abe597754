"""The manager: when it saves, what it keeps, what it finds, and what happens in the background."""

import _thread
import os
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import everygpu
from everygpu import CheckpointManager, Meter
from everygpu.checkpoint import format as format_module
from everygpu.checkpoint.directory import LOCK, hold_lock
from everygpu.errors import (
    CheckpointBusyError,
    CheckpointContentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointForeignError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    OptionError,
)
from tests.checkpoint.models import Net, same_state

manager_module = import_module("everygpu.checkpoint.manager")


class Value(nn.Module):
    """One number."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor(float(value)))


def manager(directory: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(directory, **{"model": Value(), **options})


def put(checkpoints: CheckpointManager, step: int, **metrics: Any) -> Path | None:
    """Save a step whose model has the step's number."""
    checkpoints.wait()
    checkpoints._objects["model"].value.fill_(step)
    return checkpoints.save(step, **metrics)


def loaded(directory: Path) -> tuple[int, float]:
    """The step and the model's number."""
    model = Value(-1)
    step = CheckpointManager(directory, model=model).resume()
    return step, model.value.item()


def steps_in(directory: Path) -> list[int]:
    """The steps on the disk; nothing else may be there."""
    return sorted(int(entry.name.removeprefix("step-")) for entry in directory.iterdir())


def flip(path: Path) -> None:
    """Flip a bit near the end: in a tensor's values, where the file has tensors."""
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_are_kept(tmp_path: Path, asynchronous: bool) -> None:
    with manager(tmp_path / "run", keep=2, asynchronous=asynchronous) as checkpoints:
        assert checkpoints.resume() == 0
        for step in range(5):
            path = put(checkpoints, step)
            assert path == tmp_path / "run" / f"step-{step:08d}"
    assert steps_in(tmp_path / "run") == [3, 4]
    assert checkpoints.latest() == path
    assert loaded(tmp_path / "run") == (4, 4)
    assert checkpoints.resume(3) == 3
    assert checkpoints._objects["model"].value == 3


def test_every_saves_at_multiples_and_the_last_one_when_the_block_ends(tmp_path: Path) -> None:
    with manager(tmp_path, keep=9, every=3) as checkpoints:
        saved = [put(checkpoints, step) is not None for step in range(8)]
        assert saved == [True, False, False, True, False, False, True, False]
        assert steps_in(tmp_path) == [0, 3, 6]
    assert steps_in(tmp_path) == [0, 3, 6, 7]
    assert loaded(tmp_path) == (7, 7)
    with manager(tmp_path, keep=9, every=3) as checkpoints:
        checkpoints.resume()
        put(checkpoints, 9)
    assert steps_in(tmp_path) == [0, 3, 6, 7, 9]


def test_a_block_that_fails_saves_nothing_more(tmp_path: Path) -> None:
    def train() -> None:
        with manager(tmp_path, every=3) as checkpoints:
            for step in (3, 4):
                put(checkpoints, step)
            raise KeyError("training")

    with pytest.raises(KeyError, match="training"):
        train()
    assert steps_in(tmp_path) == [3]


def test_the_best_stay_and_ties_keep_the_earlier(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=1, best=("accuracy", "max", 2))
    for step, accuracy in enumerate([0.1, 0.9, 0.5, 0.9, 0.9, float("nan")]):
        put(checkpoints, step, accuracy=torch.tensor(accuracy), loss=1.0)
    assert steps_in(tmp_path) == [1, 3, 5]
    assert checkpoints.best() == tmp_path / "step-00000001"
    assert CheckpointManager(tmp_path, best=("loss", "min", 1)).best() == tmp_path / "step-00000001"
    assert CheckpointManager(tmp_path, best=("speed", "max", 1)).best() is None
    model = Value()
    everygpu.load(checkpoints.best(), model=model)
    assert model.value == 1
    with pytest.raises(OptionError, match=r"best=\('loss', 'min', 1\)"):
        manager(tmp_path).best()


@settings(max_examples=15)
@given(
    steps=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    values=st.lists(st.sampled_from([0.0, 1.0, 2.0, float("nan")]), min_size=8, max_size=8),
    keep=st.integers(1, 3),
    num=st.integers(1, 2),
)
def test_what_stays_is_the_newest_and_the_best(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], values: list[float], keep: int, num: int
) -> None:
    """Any steps, also back to earlier ones, which replace the checkpoint of that step."""
    directory = tmp_path_factory.mktemp("run")
    checkpoints = manager(directory, keep=keep, best=("loss", "min", num))
    there: dict[int, float] = {}  # by step, the one written last at the end
    for step, value in zip(steps, values):
        put(checkpoints, step, loss=value)
        there.pop(step, None)
        there[step] = value
        finite = [step for step in there if there[step] == there[step]]
        best = sorted(finite, key=there.__getitem__)[:num]
        there = {step: there[step] for step in there if step in best or step in list(there)[-keep:]}
        assert steps_in(directory) == sorted(there)
        assert loaded(directory) == (step, step)


def test_without_checkpoints_there_is_nothing(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path / "run", best=("a", "max", 1))
    assert checkpoints.latest() is None
    assert checkpoints.best() is None
    assert checkpoints.resume() == 0
    with pytest.raises(CheckpointNotFoundError):
        checkpoints.resume(3)
    assert not (tmp_path / "run").exists()


def test_an_exported_model_in_the_directory_is_no_checkpoint(tmp_path: Path) -> None:
    save_file({"value": torch.tensor(9.0)}, tmp_path / "model.safetensors")
    checkpoints = manager(tmp_path)
    assert checkpoints.resume() == 0
    assert checkpoints._objects["model"].value == 0
    put(checkpoints, 1)
    assert loaded(tmp_path) == (1, 1)
    model = Value()
    assert everygpu.load(tmp_path, model=model) == {"step": 1}
    assert model.value == 1


# A directory with an earlier run.


@pytest.mark.parametrize("every", [1, 5])
def test_a_run_that_has_not_resumed_is_refused(tmp_path: Path, every: int) -> None:
    put(manager(tmp_path), 5)
    with pytest.raises(CheckpointForeignError, match=r"the newest of step 5. Call resume\(\) first .* overwrite=True"):
        put(manager(tmp_path, every=every), 6)
    assert loaded(tmp_path) == (5, 5)


def test_overwrite_removes_the_earlier_run_when_the_first_one_is_written(tmp_path: Path) -> None:
    old = manager(tmp_path)
    for step in (5, 6):
        put(old, step)
    with manager(tmp_path, overwrite=True, asynchronous=True) as checkpoints:
        assert steps_in(tmp_path) == [5, 6]
        put(checkpoints, 1)
        put(checkpoints, 2)
    assert steps_in(tmp_path) == [1, 2]


def test_a_resumed_run_removes_nothing_though_it_may_overwrite(tmp_path: Path) -> None:
    put(manager(tmp_path), 5)
    checkpoints = manager(tmp_path, overwrite=True)
    assert checkpoints.resume() == 5
    put(checkpoints, 6)
    assert steps_in(tmp_path) == [5, 6]


def test_going_on_from_the_best_one_leaves_the_run_where_it_is(tmp_path: Path) -> None:
    first = manager(tmp_path, best=("accuracy", "max", 1))
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
        put(first, step, accuracy=accuracy)
    second = manager(tmp_path, best=("accuracy", "max", 1))
    assert second.resume(2) == 2
    put(second, 3, accuracy=0.6)
    assert second.best() == tmp_path / "step-00000002"
    assert steps_in(tmp_path) == [1, 2, 3]


# Damage.


def test_all_damaged_is_an_error_that_lists_them(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    for step in range(2):
        flip(put(checkpoints, step) / "model.safetensors")
    with pytest.raises(CheckpointDamagedError, match=r"(?s)step-00000001/model.*step-00000000/model"):
        checkpoints.resume()


def test_without_verify_a_flip_passes_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = everygpu.save(tmp_path / "ckpt", model=Net())
    flip(path / "model.safetensors")
    with caplog.at_level("INFO", "everygpu"):
        everygpu.load(path, model=Net(), verify=False)
    assert "without comparing" in caplog.text
    with pytest.raises(CheckpointDamagedError, match=r"model\.safetensors was altered"):
        everygpu.load(path, model=Net())


def test_what_only_has_the_name_of_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / ".metadata").write_text("of another program")
    (tmp_path / "step-00000002").write_text("a file")
    everygpu.save(tmp_path / "archive", value=1)
    (tmp_path / "step-00000003").symlink_to("archive")
    checkpoints = manager(tmp_path, keep=1)
    for step in range(4, 7):
        put(checkpoints, step)
    assert sorted(os.listdir(tmp_path)) == ["archive", *(f"step-0000000{step}" for step in (1, 2, 3, 6))]
    assert everygpu.load(tmp_path / "archive") == {"value": 1}


def test_a_relative_directory_stays_the_same_when_the_program_goes_elsewhere(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("run", keep=1, asynchronous=True, model=Value()) as checkpoints:
        checkpoints.save(1)
        monkeypatch.chdir("elsewhere")
        path = checkpoints.save(2)
        checkpoints.wait()
        assert checkpoints.latest() == path == tmp_path / "run" / "step-00000002"
    assert steps_in(tmp_path / "run") == [2]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_another_saver_in_the_directory_is_refused(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    put(checkpoints, 1)
    with hold_lock(tmp_path / LOCK), pytest.raises(CheckpointBusyError):
        checkpoints.save(2)
    assert steps_in(tmp_path) == [1]
    checkpoints.save(2)


def test_a_checkpoint_s_own_directory_is_refused(tmp_path: Path) -> None:
    everygpu.save(tmp_path / "ckpt", value=1)
    with pytest.raises(CheckpointForeignError, match="ckpt-run"):
        manager(tmp_path / "ckpt").save(1)
    assert everygpu.load(tmp_path / "ckpt") == {"value": 1}


# What it is called with.


def test_a_loss_with_its_graph_and_a_meter_are_metrics(tmp_path: Path) -> None:
    meter = Meter()
    meter.update(0.25, 4)
    checkpoints = manager(tmp_path, best=("loss", "min", 1))
    checkpoints.save(1, loss=torch.ones((), requires_grad=True))  # warnings are errors here
    checkpoints.save(2, loss=meter)
    assert checkpoints.best() == tmp_path / "step-00000002"


def test_a_misspelt_metric_is_an_error_that_names_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = manager(tmp_path / "run", best=("acc", "max", 1))
    with manager(tmp_path / "other", best=("acc", "max", 1)) as never:
        never.save(1)
    assert "had the metric 'acc'" in caplog.text
    with pytest.raises(OptionError, match="best is by 'acc', got 'accuracy', 'loss'"):
        checkpoints.save(1, accuracy=0.5, loss=1.0)
    assert not (tmp_path / "run").exists()
    checkpoints.save(1)
    checkpoints.save(2, acc=0.5)
    checkpoints.save(3, time_s=1)  # a metric may be there at some saves only
    assert checkpoints.best() == tmp_path / "run" / "step-00000002"


@pytest.mark.parametrize(
    ("options", "call", "error"),
    [
        *(({name: value}, None, OptionError) for name, value in (("keep", 0), ("keep", True), ("every", 1.5))),
        *(({"best": best}, None, OptionError) for best in ({"a": "max"}, "loss", ("a", "up", 1), ("a", "max", 0))),
        *(({name: {}}, None, CheckpointContentError) for name in ("model", "optimizer", "config", "epoch")),
        *(({}, lambda made, step=step: made.save(step), OptionError) for step in (-1, 1.0, True, "1", Net())),
        *(({}, lambda made, x=x: made.save(1, loss=x), OptionError) for x in (None, "good", torch.ones(2), 10**400)),
        ({"model": None}, lambda made: made.save(1), OptionError),
    ],
)
def test_what_can_t_be_meant_is_refused(tmp_path: Path, options: dict[str, Any], call: Any, error: Any) -> None:
    with pytest.raises(error, match=r"CheckpointManager: |must be|is a whole number|The metric loss|nothing to save"):
        (call or str)(manager(tmp_path, **options))
    assert steps_in(tmp_path) == []


def test_an_object_that_was_not_saved_changes_nothing(tmp_path: Path) -> None:
    put(manager(tmp_path), 1)
    checkpoints = manager(tmp_path, shuffle=torch.Generator())
    with pytest.raises(CheckpointMismatchError, match="no part named shuffle"):
        checkpoints.resume()
    assert checkpoints._objects["model"].value == 0


# In the background.


def slow_down(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make writing wait until the event is set."""
    real, go_on = manager_module.write_checkpoint, threading.Event()

    def write(*args: Any, **options: Any) -> Any:
        assert go_on.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(manager_module, "write_checkpoint", write)
    return go_on


def test_training_goes_on_and_what_is_saved_is_the_moment_of_the_call(tmp_path: Path, monkeypatch) -> None:
    go_on = slow_down(monkeypatch)
    model = Net(1)
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("turned", torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t())
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(tmp_path, asynchronous=True, model=model, optimizer=optimizer) as checkpoints:
        checkpoints.save(1)
        with torch.no_grad():
            for value in model.state_dict().values():
                value.zero_()
        assert checkpoints.latest() is None
        go_on.set()
        checkpoints.wait()
        assert checkpoints.latest() is not None
        checkpoints.resume()
    assert same_state(dict(model.state_dict()), expected)
    assert model.head.weight is model.embed.weight
    assert (tmp_path / "step-00000001" / "model.safetensors").stat().st_size < 2000, "tied weights are stored twice"


def test_one_save_waits_for_the_one_before(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("x", torch.zeros(1000))
    with CheckpointManager(tmp_path, keep=9, asynchronous=True, model=model) as checkpoints:
        for step in range(6):
            model.x.fill_(step)
            checkpoints.save(step)
    for step in range(6):
        checkpoints.resume(step)
        assert model.x.unique().tolist() == [step]


@pytest.mark.parametrize("call", ["save", "save at no multiple", "resume", "latest", "best", "wait", "close", "exit"])
def test_an_error_in_the_background_is_raised_once_at_the_next_call(tmp_path: Path, monkeypatch, call: str) -> None:
    checkpoints = manager(tmp_path, every=2, asynchronous=True, best=("loss", "min", 1))
    checkpoints.save(0)
    checkpoints.wait()

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(format_module, "write_safetensors", fail)
        checkpoints.save(2)
        deadline = time.monotonic() + 60
        while not checkpoints._background._task.is_done:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    calls = {
        "save": lambda: checkpoints.save(4),
        "save at no multiple": lambda: checkpoints.save(5),
        "resume": checkpoints.resume,
        "latest": checkpoints.latest,
        "best": checkpoints.best,
        "wait": checkpoints.wait,
        "close": checkpoints.close,
        "exit": lambda: checkpoints.__exit__(None, None, None),
    }
    with pytest.raises(CheckpointError, match="No space left"):
        calls[call]()
    assert steps_in(tmp_path) == [0]
    checkpoints.save(6)
    checkpoints.close()
    assert steps_in(tmp_path) == [0, 6]


def test_the_block_s_own_error_is_the_one_that_is_seen(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(manager_module, "write_checkpoint", raise_full)

    def train() -> None:
        with manager(tmp_path, asynchronous=True) as checkpoints:
            checkpoints.save(1)
            raise KeyError("training")

    with pytest.raises(KeyError, match="training"):
        train()
    assert "failed: full" in caplog.text


def raise_full(*args: Any, **options: Any) -> None:
    raise CheckpointError("full")


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_without_new_threads_the_caller_s_does_the_work(tmp_path: Path, monkeypatch, asynchronous: bool) -> None:
    """As Python 3.12 and later at the interpreter's end, or a process at its limit."""

    def refuse(*args: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    checkpoints = manager(tmp_path, keep=1, asynchronous=asynchronous)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        put(checkpoints, 1)
        patch.setattr(_thread, "start_new_thread", refuse)
        put(checkpoints, 2)
        assert steps_in(tmp_path) == [2]
        assert loaded(tmp_path) == (2, 2)
    checkpoints.close()


EXITS = """
import atexit, sys, threading, torch, everygpu

class State(torch.nn.Module):
    def __init__(self, step):
        super().__init__()
        self.register_buffer("x", torch.full((1_000_000,), float(step)))

def save(name, step):
    checkpoints = everygpu.CheckpointManager(sys.argv[1] + "/" + name, asynchronous=True, model=State(step))
    checkpoints.save(step)
    return checkpoints

def save_at_exit():
    save("at exit", 1)
    checkpoints = save("at exit, closed", 2)
    checkpoints.close()
    assert checkpoints.resume() == 2

def train():
    threading.main_thread().join()
    checkpoints = save("thread", 3)
    checkpoints.save(4)

atexit.register(save_at_exit)
threading.Thread(target=train).start()
save("main", 5)
raise KeyboardInterrupt
"""


@pytest.mark.usefixtures("warm_python")
def test_the_last_checkpoint_is_there_however_the_program_ends(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", EXITS, tmp_path], capture_output=True, text=True, timeout=60)
    assert "KeyboardInterrupt" in ended.stderr
    assert "AssertionError" not in ended.stderr
    for name, step in {"at exit": 1, "at exit, closed": 2, "thread": 4, "main": 5}.items():
        assert everygpu.load(tmp_path / name, rng=True)["step"] == step, name
