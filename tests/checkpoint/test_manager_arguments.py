"""What a manager is called with: names of metrics, and objects that are called as its own arguments."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import everygpu
from everygpu import CheckpointManager, Meter
from everygpu.errors import CheckpointContentError, OptionError


@pytest.mark.parametrize("keep_best", [["acc"], "acc", {"acc"}])
def test_keep_best_is_a_dict(tmp_path: Path, keep_best: Any) -> None:
    with pytest.raises(OptionError, match=r"keep_best must be a dict.*acc.*\{'accuracy': 'max'\}"):
        CheckpointManager(tmp_path, keep_best=keep_best)


@pytest.mark.parametrize("metrics", [[1], 0, Meter(), {"loss"}], ids=repr)
def test_metrics_are_a_dict(tmp_path: Path, metrics: Any) -> None:
    with pytest.raises(OptionError, match=r"metrics must be a dict of numbers.*got .*\{'accuracy': 0.9\}"):
        CheckpointManager(tmp_path / "run").save(1, metrics=metrics)
    assert not (tmp_path / "run" / "step-00000001").exists()


def test_a_misspelt_metric_is_an_error_that_names_both(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "run", keep_best={"acc": "max"})
    with pytest.raises(OptionError, match="keep_best, 'acc', got 'accuracy', 'loss'"):
        checkpoints.save(1, metrics={"accuracy": 0.5, "loss": 1.0})
    assert not (tmp_path / "run").exists()


def test_a_metric_may_be_there_at_some_saves_only(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=1, keep_best={"acc": "max", "loss": "min"})
    for step, metrics in enumerate([None, {}, {"acc": 0.5, "time_s": 1}, {"time_s": 1}, {"loss": float("nan")}]):
        checkpoints.save(step, metrics=metrics)
    assert checkpoints.best("acc") == tmp_path / "step-00000002"
    resumed = CheckpointManager(tmp_path, keep=1, keep_best={"acc": "max", "loss": "min"})
    resumed.load()
    resumed.save(5, metrics={"time_s": 1})
    assert resumed.best("acc") == tmp_path / "step-00000002"


def test_saves_that_never_have_the_metric_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = CheckpointManager(tmp_path, keep_best={"acc": "max"})
    for step in range(4):
        checkpoints.save(step)
    assert not caplog.records
    for step in range(4, 12):
        checkpoints.save(step)
    assert [record.getMessage() for record in caplog.records] == [
        f"save: 5 saves to {tmp_path} had no metric of keep_best, 'acc', so no best checkpoint is kept. "
        f"Pass metrics={{'acc': …}} to save."
    ]


@pytest.mark.parametrize("name", ["keep", "every", "keep_best", "asynchronous", "signals"])
def test_what_a_manager_is_made_with_is_no_extra_of_a_save(tmp_path: Path, name: str) -> None:
    assert name in signature(CheckpointManager).parameters
    options: Any = {name: 1}
    with pytest.raises(CheckpointContentError, match=f"options, got '{name}'"):
        CheckpointManager(tmp_path / "run").save(1, **options)
    assert not (tmp_path / "run" / "step-00000001").exists()


class Step:
    """Has a state, as a TrainStep."""

    def __init__(self) -> None:
        self.num_steps = 3

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_steps = state["num_steps"]


def test_an_object_named_step_needs_another_name(tmp_path: Path) -> None:
    checkpoints, step = CheckpointManager(tmp_path), Step()
    with pytest.raises(OptionError, match=r"got Step as well.*train_step=step"):
        checkpoints.save(1, step=step)
    with pytest.raises(OptionError, match=r"step must be a whole number.*train_step=step"):
        checkpoints.save(step=step)
    checkpoints.save(1, train_step=step)
    with pytest.raises(OptionError, match=r"step must be a whole number.*train_step=step"):
        checkpoints.load(step=step)
    step.num_steps = 0
    assert checkpoints.load(train_step=step) == {"step": 1}
    assert step.num_steps == 3


def test_the_step_s_number_may_be_passed_by_name(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    assert checkpoints.save(step=7, value=3) == tmp_path / "step-00000007"
    assert checkpoints.load(step=7) == {"value": 3, "step": 7}
    with pytest.raises(OptionError, match="step must be a whole number from 0 on, got None"):
        checkpoints.save(value=3)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".bin", ".safetensors"])
def test_a_directory_named_as_a_file_is_warned_of(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    with pytest.warns(UserWarning, match=rf"is a directory.*everygpu checkpoint convert .*\{suffix}") as caught:
        everygpu.save(path, value=1)
    assert [warning.filename for warning in caught] == [__file__]
    assert everygpu.load(path) == {"value": 1}
