"""A run that begins in the directory of an earlier one without loading it: nothing is lost, and a warning says so."""

import os
from importlib import import_module
from pathlib import Path

import pytest
from torch import nn

import everygpu
from everygpu import CheckpointManager
from everygpu.checkpoint.verify import examine, total_bytes
from everygpu.errors import CheckpointError

earlier_run = import_module("everygpu.checkpoint.earlier_run")


def steps_in(directory: Path) -> list[int]:
    return sorted(int(entry.name.removeprefix("step-")) for entry in directory.glob("step-*"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of steps 8 and 9, the better of which is 8."""
    checkpoints = CheckpointManager(tmp_path / "run", keep_best={"loss": "min"})
    for step in (8, 9):
        checkpoints.save(step, metrics={"loss": step})
    return tmp_path / "run"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("first", [1, 9])
def test_it_is_set_aside(run: Path, caplog: pytest.LogCaptureFixture, asynchronous: bool, first: int) -> None:
    with CheckpointManager(run, keep=2, keep_best={"loss": "min"}, asynchronous=asynchronous) as checkpoints:
        for step in range(first, first + 3):
            checkpoints.save(step, metrics={"loss": 100 - step})
    assert steps_in(run) == [first + 1, first + 2]
    (folder,) = run.glob("before-*")
    assert steps_in(folder) == [8, 9]
    assert everygpu.load(folder) == {"step": 9}
    assert CheckpointManager(folder).best("loss", "min") == folder / "step-00000008"
    assert checkpoints.latest() == checkpoints.best("loss") == run / f"step-{first + 2:08d}"
    assert "2 checkpoints" in examine(run).format
    assert total_bytes(run) == sum(file.stat().st_size for file in run.glob("step-*/*"))
    (record,) = caplog.records
    assert "steps 8, 9" in record.getMessage()
    assert f"CheckpointManager({str(folder)!r}).load(" in record.getMessage()


def test_a_run_that_loaded_goes_back_as_it_likes(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = CheckpointManager(run, keep=2)
    assert checkpoints.load(8) == {"step": 8}
    checkpoints.save(8)
    checkpoints.save(7)
    assert sorted(os.listdir(run)) == ["step-00000007", "step-00000008"]
    assert not caplog.records


def test_a_load_that_failed_is_none(run: Path) -> None:
    checkpoints = CheckpointManager(run)
    with pytest.raises(CheckpointError):
        checkpoints.load(7)
    checkpoints.save(1)
    assert steps_in(run) == [1]


def test_a_first_step_above_all_goes_on(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = CheckpointManager(run)
    for step in (10, 3):  # only the first save is looked at
        checkpoints.save(step)
    assert sorted(os.listdir(run)) == [f"step-000000{step}" for step in ("03", "09", "10")]
    assert not caplog.records


def test_a_manager_for_each_save_is_one_run(run: Path) -> None:
    CheckpointManager(run).save(1)
    CheckpointManager(run).save(9)
    other = CheckpointManager(run)
    other.load()
    other.save(20)
    CheckpointManager(run).save(21)
    earlier_run._last_steps()[run] = 5  # as if 20 and 21 were of another process
    CheckpointManager(run).save(6)
    assert steps_in(run) == [6, 20, 21]
    CheckpointManager(run).save(6)  # a program that begins again, in a notebook
    assert steps_in(run) == [6]
    assert sorted(map(len, map(os.listdir, run.glob("before-*")))) == [2, 3]


def test_a_save_that_fails_leaves_it_where_it_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = CheckpointManager(run)

    def fail(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(import_module("everygpu.checkpoint.save"), "write_tensors", fail)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoints.save(1, model=nn.Linear(1, 1))
    assert sorted(os.listdir(run)) == ["step-00000008", "step-00000009"]
    checkpoints.save(1)
    assert steps_in(run) == [1]


def test_what_fails_between_two_renames_is_set_aside_by_the_next_save(run: Path, monkeypatch) -> None:
    checkpoints, real = CheckpointManager(run), os.rename

    def rename(old: Path, new: Path) -> None:
        if list(run.glob("before-*/*")):
            raise OSError(5, "Input/output error")
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(CheckpointError, match="Input/output"):
            checkpoints.save(1)
    assert checkpoints.latest() == run / "step-00000009", "the newest is moved last"
    checkpoints.save(2)
    assert steps_in(run) == [2]
    assert sorted(path.name for path in run.glob("before-*/*")) == ["step-00000008", "step-00000009"]


def test_what_only_has_the_name_of_a_checkpoint_stays(tmp_path: Path) -> None:
    (tmp_path / "step-00000009").write_text("a file")
    everygpu.save(tmp_path / "archive", value=1)
    (tmp_path / "step-00000008").symlink_to("archive")
    CheckpointManager(tmp_path).save(1)
    assert sorted(os.listdir(tmp_path)) == ["archive", *(f"step-0000000{step}" for step in (1, 8, 9))]
