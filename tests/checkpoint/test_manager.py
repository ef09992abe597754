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
from torch import nn

import everygpu
from everygpu import CheckpointManager
from everygpu.checkpoint.lock import hold_lock
from everygpu.errors import (
    CheckpointBusyError,
    CheckpointContentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointForeignError,
    CheckpointNotFoundError,
    OptionError,
)
from tests.checkpoint.models import Net, same_state

manager_module = import_module("everygpu.checkpoint.manager")
run_directory = import_module("everygpu.checkpoint.run_directory")
save_module = import_module("everygpu.checkpoint.save")


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
    with CheckpointManager(tmp_path / "run", keep=2, asynchronous=asynchronous) as checkpoints:
        for step in range(5):
            path = checkpoints.save(step, model=Net(step))
            assert path == tmp_path / "run" / f"step-{step:08d}"
    assert steps_in(tmp_path / "run") == [3, 4]
    assert checkpoints.latest() == path
    target = Net(9)
    assert checkpoints.load(model=target) == {"step": 4}
    assert same_state(dict(target.state_dict()), dict(Net(4).state_dict()))
    assert checkpoints.load(3, model=target) == {"step": 3}


def test_every_saves_at_multiples_and_force_at_any(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=9, every=3)
    saved = [checkpoints.save(step) is not None for step in range(8)]
    assert saved == [True, False, False, True, False, False, True, False]
    assert checkpoints.save(7, force=True) == tmp_path / "step-00000007"
    assert steps_in(tmp_path) == [0, 3, 6, 7]


def test_the_best_stays(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=1, keep_best={"accuracy": "max", "loss": "min"})
    for step, (accuracy, loss) in enumerate([(0.1, 3.0), (0.9, 2.0), (0.5, 1.0), (float("nan"), float("inf"))]):
        checkpoints.save(step, metrics={"accuracy": torch.tensor(accuracy), "loss": loss})
    assert steps_in(tmp_path) == [1, 2, 3]
    assert checkpoints.best("accuracy") == tmp_path / "step-00000001"
    assert checkpoints.best("loss") == tmp_path / "step-00000002"
    assert checkpoints.best("loss", "max") == tmp_path / "step-00000001"
    assert checkpoints.best("speed", "max") is None
    assert everygpu.load(checkpoints.best("accuracy")) == {"step": 1}


def test_of_equally_good_ones_the_newest_is_best(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=1, keep_best={"accuracy": "max"})
    for step in range(3):
        checkpoints.save(step, metrics={"accuracy": 1.0})
    assert steps_in(tmp_path) == [2]


@settings(max_examples=25)
@given(
    steps=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    values=st.lists(st.sampled_from([0.0, 1.0, 2.0, float("nan")]), min_size=8, max_size=8),
    keep=st.integers(1, 3),
)
def test_what_stays_is_the_newest_and_the_best(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], values: list[float], keep: int
) -> None:
    """Any steps, also back to earlier ones, which replace the checkpoint of that step."""
    directory = tmp_path_factory.mktemp("run")
    checkpoints = CheckpointManager(directory, keep=keep, keep_best={"loss": "min"})
    there: dict[int, float] = {}  # by step, the one written last at the end
    for step, value in zip(steps, values):
        checkpoints.save(step, metrics={"loss": value})
        there.pop(step, None)
        there[step] = value
        finite = [value for value in there.values() if value == value]
        best = [step for step in there if finite and there[step] == min(finite)][-1:]
        there = {step: there[step] for step in there if step in best or step in list(there)[-keep:]}
        assert steps_in(directory) == sorted(there)
        assert checkpoints.load() == {"step": step}


def test_after_going_back_the_checkpoint_written_last_is_the_latest(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    for step in (100, 200, 150):
        checkpoints.save(step)
    assert CheckpointManager(tmp_path).latest() == tmp_path / "step-00000150"
    assert CheckpointManager(tmp_path).load() == {"step": 150}


def test_without_checkpoints_there_is_nothing(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "run", keep_best={"a": "max"})
    assert checkpoints.latest() is None
    assert checkpoints.best("a") is None
    with pytest.raises(CheckpointNotFoundError):
        checkpoints.load()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_a_damaged_one_is_stepped_over_with_a_warning_that_names_it(tmp_path: Path, name: str) -> None:
    checkpoints = CheckpointManager(tmp_path)
    for step in range(3):
        checkpoints.save(step, model=Net(step))
    flip(tmp_path / "step-00000002" / name)
    target = Net(9)
    with pytest.warns(UserWarning, match=rf"(?s)step-00000001 is taken.*step-00000002/{name}"):
        assert checkpoints.load(model=target) == {"step": 1}
    assert same_state(dict(target.state_dict()), dict(Net(1).state_dict()))
    with pytest.warns(UserWarning, match="is taken"):
        assert everygpu.load(tmp_path) == {"step": 1}
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        checkpoints.load(2, model=target)


def test_a_link_with_a_leftover_s_name_hides_no_checkpoint(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, value=1)
    (tmp_path / ".step-00000009.old-1-0123abcd").symlink_to(tmp_path / "step-00000001")
    assert manager.load()["value"] == 1


def test_a_damaged_one_saved_after_going_back_is_named(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    for step in (5, 3):
        path = checkpoints.save(step, model=Net(step))
        assert path is not None
        os.utime(path, ns=(0, 10**9 * (9 - step)))
    flip(tmp_path / "step-00000003" / "manifest.json")
    with pytest.warns(UserWarning, match=r"(?s)step-00000005 is taken.*step-00000003/manifest\.json"):
        assert checkpoints.load() == {"step": 5}


def test_checkpoints_in_each_other_s_place_are_named(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    for step in range(3):
        checkpoints.save(step, model=Net(step))
    assert checkpoints.load() == {"step": 2}
    for old, new in (("1", "x"), ("2", "1"), ("x", "2")):
        os.rename(tmp_path / f"step-0000000{old}", tmp_path / f"step-0000000{new}")
    with pytest.warns(UserWarning, match="step-00000002 is taken, which holds the checkpoint of step 1"):
        assert checkpoints.load(2) == {"step": 1}
    with pytest.warns(UserWarning, match="step-00000001 is taken, which holds the checkpoint of step 2"):
        assert checkpoints.load() == {"step": 2}


def test_all_damaged_is_an_error_that_lists_them(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    for step in range(2):
        flip(checkpoints.save(step, model=Net(step)) / "model.safetensors")
    with pytest.raises(CheckpointDamagedError, match=r"(?s)step-00000001/model.*step-00000000/model"):
        checkpoints.load(model=Net())


def test_a_damaged_one_does_not_count_towards_keep(tmp_path: Path) -> None:
    for step in range(3):
        CheckpointManager(tmp_path, keep=3, keep_best={"loss": "min"}).save(step, model=Net(step), metrics={"loss": 1})
    flip(tmp_path / "step-00000002" / "model.safetensors")
    checkpoints = CheckpointManager(tmp_path, keep=2)
    checkpoints.save(3, model=Net(3))
    assert steps_in(tmp_path) == [1, 2, 3], "the last whole one but the newest is gone"
    checkpoints.save(4, model=Net(4))
    assert steps_in(tmp_path) == [3, 4]


def test_a_damaged_best_one_does_not_count_as_best(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=1, keep_best={"loss": "min"})
    for step, loss in enumerate([2.0, 1.0]):
        CheckpointManager(tmp_path, keep=9).save(step, model=Net(step), metrics={"loss": loss})
    flip(tmp_path / "step-00000001" / "model.safetensors")
    checkpoints.save(2, model=Net(2), metrics={"loss": 3.0})
    assert steps_in(tmp_path) == [0, 1, 2]


def test_only_what_this_manager_has_not_written_is_read_and_once(tmp_path: Path, monkeypatch) -> None:
    for step in range(3):
        CheckpointManager(tmp_path).save(step, model=Net(step))
    read: list[str] = []
    real = run_directory.check_files
    monkeypatch.setattr(run_directory, "check_files", lambda path, *args: (read.append(path.name), real(path, *args)))
    checkpoints = CheckpointManager(tmp_path, keep=3)
    for step in range(3, 8):
        checkpoints.save(step, model=Net(step))
    assert read == ["step-00000002", "step-00000001"]
    os.utime(tmp_path / "step-00000007" / "model.safetensors", ns=(1, 1))
    checkpoints.save(8, model=Net(8))
    assert read[2:] == ["step-00000007"]


def test_without_verify_a_flip_passes_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = everygpu.save(tmp_path / "ckpt", model=Net())
    flip(path / "model.safetensors")
    with caplog.at_level("INFO", "everygpu"):
        everygpu.load(path, model=Net(), verify=False)
    assert "verify=False" in caplog.text
    with pytest.raises(CheckpointDamagedError, match=r"model\.safetensors that was altered between"):
        everygpu.load(path, model=Net())


def test_what_a_killed_saver_left_is_cleared_or_put_back(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=1)
    checkpoints.save(1, value="old")
    os.rename(tmp_path / "step-00000001", tmp_path / ".step-00000001.old-1-0badcafe")
    (tmp_path / ".step-00000002.tmp-1-0badcafe").mkdir()
    (tmp_path / ".notes").write_text("the user's")
    assert checkpoints.latest() == tmp_path / "step-00000001"
    with pytest.warns(UserWarning, match="cut off"):
        assert checkpoints.load() == {"value": "old", "step": 1}
    checkpoints.keep = 2
    checkpoints.save(3)
    assert sorted(os.listdir(tmp_path)) == [".notes", "step-00000001", "step-00000003"]
    assert checkpoints.load(1) == {"value": "old", "step": 1}


def test_what_only_has_the_name_of_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / ".metadata").write_text("of another program")
    (tmp_path / "step-00000002").write_text("a file")
    everygpu.save(tmp_path / "archive", value=1)
    (tmp_path / "step-00000003").symlink_to("archive")
    checkpoints = CheckpointManager(tmp_path, keep=1)
    for step in range(4, 7):
        checkpoints.save(step)
    assert sorted(os.listdir(tmp_path)) == ["archive", *(f"step-0000000{step}" for step in (1, 2, 3, 6))]
    assert (tmp_path / "step-00000001" / ".metadata").read_text() == "of another program"
    assert everygpu.load(tmp_path / "archive") == {"value": 1}


def test_a_relative_directory_stays_the_same_when_the_program_goes_elsewhere(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("run", keep=1, asynchronous=True) as checkpoints:
        checkpoints.save(1)
        monkeypatch.chdir("elsewhere")
        path = checkpoints.save(2)
        checkpoints.wait()
        assert checkpoints.latest() == path == tmp_path / "run" / "step-00000002"
    assert steps_in(tmp_path / "run") == [2]
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("value", [None, "good", torch.ones(2), 10**400], ids=["none", "text", "several", "huge"])
def test_metrics_that_are_no_numbers_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(OptionError, match="for loss"):
        CheckpointManager(tmp_path).save(1, metrics={"loss": value})
    assert steps_in(tmp_path) == []


def test_a_loss_with_its_graph_is_a_metric(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1, metrics={"loss": torch.ones((), requires_grad=True)})  # warnings are errors here
    assert checkpoints.best("loss", "min") == tmp_path / "step-00000001"


def test_another_saver_in_the_directory_is_refused(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1)
    with hold_lock(tmp_path / ".lock"), pytest.raises(CheckpointBusyError):
        checkpoints.save(2)
    assert steps_in(tmp_path) == [1]
    checkpoints.save(2)


def test_a_checkpoint_s_own_directory_is_refused(tmp_path: Path) -> None:
    everygpu.save(tmp_path / "ckpt", value=1)
    with pytest.raises(CheckpointForeignError, match="ckpt-run"):
        CheckpointManager(tmp_path / "ckpt").save(1)
    assert everygpu.load(tmp_path / "ckpt") == {"value": 1}


@pytest.mark.parametrize(
    "options", [{"keep": 0}, {"keep": True}, {"every": 0}, {"every": 1.5}, {"keep_best": {"a": "up"}}]
)
def test_options_outside_what_they_may_be(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="CheckpointManager: "):
        CheckpointManager(tmp_path, **options)


def test_steps_and_modes_that_are_none(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    for step in (-1, 1.0, True, "1"):
        with pytest.raises(OptionError, match="step must be"):
            checkpoints.save(step)
    with pytest.raises(OptionError, match="mode='max'"):
        checkpoints.best("loss")


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
    with CheckpointManager(tmp_path, asynchronous=True) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer)
        with torch.no_grad():
            for value in model.state_dict().values():
                value.zero_()
        assert checkpoints.latest() is None
        go_on.set()
        checkpoints.wait()
        assert checkpoints.latest() is not None
        checkpoints.load(model=model, optimizer=optimizer)
    assert same_state(dict(model.state_dict()), expected)
    assert model.head.weight is model.embed.weight
    assert (tmp_path / "step-00000001" / "model.safetensors").stat().st_size < 2000, "tied weights are stored twice"


def test_one_save_waits_for_the_one_before(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=9, asynchronous=True) as checkpoints:
        for step in range(6):
            checkpoints.save(step, x=torch.full((1000,), float(step)))
    for step in range(6):
        assert checkpoints.load(step)["x"].unique().tolist() == [step]


@pytest.mark.parametrize("call", ["save", "save at no multiple", "load", "latest", "best", "wait", "close", "exit"])
def test_an_error_in_the_background_is_raised_once_at_the_next_call(tmp_path: Path, monkeypatch, call: str) -> None:
    checkpoints = CheckpointManager(tmp_path, every=2, asynchronous=True)
    checkpoints.save(0)
    checkpoints.wait()

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(save_module, "write_tensors", fail)
        checkpoints.save(2, x=torch.ones(1))
        deadline = time.monotonic() + 60
        while not checkpoints._background._tasks[0].is_done:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    calls = {
        "save": lambda: checkpoints.save(4),
        "save at no multiple": lambda: checkpoints.save(5),
        "load": checkpoints.load,
        "latest": checkpoints.latest,
        "best": lambda: checkpoints.best("loss", "min"),
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
        with CheckpointManager(tmp_path, asynchronous=True) as checkpoints:
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

    checkpoints = CheckpointManager(tmp_path, keep=1, asynchronous=asynchronous)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        checkpoints.save(1, model=Net(1))
        patch.setattr(_thread, "start_new_thread", refuse)
        checkpoints.save(2, model=Net(2))
        assert steps_in(tmp_path) == [2]
        assert checkpoints.load(model=Net()) == {"step": 2}
    checkpoints.close()


EXITS = """
import atexit, sys, threading, torch, everygpu

def save(name, step):
    checkpoints = everygpu.CheckpointManager(sys.argv[1] + "/" + name, asynchronous=True)
    checkpoints.save(step, x=torch.full((3_000_000,), float(step)))
    return checkpoints

def save_at_exit():
    save("at exit", 1)
    checkpoints = save("at exit, closed", 2)
    checkpoints.close()
    assert checkpoints.load()["x"].unique().tolist() == [2]

def train():
    threading.main_thread().join()
    save("thread", 3).save(4, x=torch.full((3_000_000,), 4.0))

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
        found = everygpu.load(tmp_path / name)
        assert (found["step"], found["x"].unique().tolist()) == (step, [step]), name


def test_what_can_t_be_saved_is_refused_in_the_caller_s_thread(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, asynchronous=True) as checkpoints:
        with pytest.raises(CheckpointContentError):
            checkpoints.save(1, model=nn.Linear(1, 1, device="meta"))
        with pytest.raises(CheckpointContentError, match="'verify'"):
            checkpoints.save(1, verify=True)


def test_snapshots_reuse_their_memory_and_give_it_back(tmp_path: Path, devices) -> None:
    device = devices(2)[-1]
    model = nn.Linear(64, 64).to(device)
    checkpoints = CheckpointManager(tmp_path, asynchronous=True)
    checkpoints.save(1, model=model)
    checkpoints.wait()
    memory = checkpoints._spare[0]._memory
    checkpoints.save(2, model=model)
    checkpoints.wait()
    assert checkpoints._spare[0]._memory is memory
    assert memory.numel() <= sum(p.nbytes for p in model.parameters()) + 64 * 2 + 1024 * 8
    assert memory.is_pinned() == device.type.startswith("cuda")
    checkpoints.close()
    assert not checkpoints._spare
    checkpoints.save(3, model=model)
    checkpoints.close()
    assert checkpoints.load()["step"] == 3
