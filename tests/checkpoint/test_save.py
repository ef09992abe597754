"""Saving: what is on the disk, that failures leave the old checkpoint, and what is refused."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everygpu
from everygpu.errors import CheckpointContentError, CheckpointError, OptionError
from tests.checkpoint.models import Counting, Net, same_state


def names_in(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_it_returns_the_path_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert everygpu.save("runs/last", epoch=1) == Path("runs/last")
    assert everygpu.load(Path("runs/last")) == {"epoch": 1}


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path / "home"))
    assert everygpu.save("~/last", epoch=1) == tmp_path / "home" / "last"
    assert everygpu.load(Path("~/last")) == {"epoch": 1}
    checkpoints = everygpu.CheckpointManager("~/run", model=nn.Linear(1, 1))
    assert checkpoints.save(7) == tmp_path / "home" / "run" / "step-00000007"
    assert everygpu.load("~/run") == {"step": 7}
    assert not names_in(tmp_path / "here")


def test_only_the_parts_passed_are_written(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    always = {"checkpoint.json", "SHA256SUMS"}
    assert names_in(everygpu.save(tmp_path / "b", model=model)) == always | {"model.safetensors"}
    assert names_in(everygpu.save(tmp_path / "c", scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))) == always
    assert names_in(everygpu.save(tmp_path / "d", epoch=3, name="x")) == always
    assert names_in(everygpu.save(tmp_path / "e", best=torch.ones(1))) == always | {"training.safetensors"}


def test_pickle_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pickle was used")

    for module, name in [(pickle, "dumps"), (pickle, "dump"), (pickle, "loads"), (pickle, "load"), (torch, "save")]:
        monkeypatch.setattr(module, name, refuse)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    everygpu.save(tmp_path / "ckpt", model=model, optimizer=optimizer, extra={"a": (1, torch.ones(1))})
    everygpu.load(tmp_path / "ckpt", model=model, optimizer=optimizer, rng=True)


def test_saving_changes_nothing_in_the_run(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    before = (model.state_dict(), optimizer.state_dict(), torch.get_rng_state())
    everygpu.save(tmp_path / "ckpt", model=model, optimizer=optimizer)
    assert same_state((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()), before)
    assert model.head.weight is model.embed.weight
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_parent_that_is_a_file_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="can't be written"):
        everygpu.save(tmp_path / "file" / "ckpt", epoch=1)


@pytest.mark.parametrize("path", ["", None, 5, b"ckpt", "a\0b"], ids=repr)
def test_what_names_no_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="save: .* is no path"):
        everygpu.save(path, epoch=1)
    with pytest.raises(OptionError, match="CheckpointManager: .* is no path"):
        everygpu.CheckpointManager(path)
    with pytest.raises(OptionError, match="load: .* is no path"):
        everygpu.load(path)
    assert not names_in(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "SHA256SUMS"])
def test_a_damaged_checkpoint_may_be_replaced(tmp_path: Path, name: str) -> None:
    path = everygpu.save(tmp_path / "ckpt", model=Net(), epoch=1)
    (path / name).unlink()
    document = path / "checkpoint.json"
    document.write_text(document.read_text()[:50])
    everygpu.save(path, epoch=2)
    assert everygpu.load(path) == {"epoch": 2}


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"model": Net().state_dict()}, "model must be a torch.nn.Module, got OrderedDict"),
        ({"model": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "model must be .*, got SGD"),
        ({"model": lambda x: x}, "model must be .*, got function"),
        ({"optimizer": {}}, "optimizer must be .*, got dict"),
        ({"optimizer": Net()}, "optimizer must be .*, got Net"),
        ({"scheduler": 3}, "scheduler must be .*, got int"),
        ({"config": {"fn": [len]}}, r"config\.fn\.0 is a builtin_function_or_method"),
        ({"nested": {"ema": Net()}}, r"nested\.ema is a Net"),
        ({"loss": torch.eye(2).to_sparse()}, "at loss has the layout"),
        ({"model": Counting(object())}, r"_extra_state is a object"),
        ({"model": nn.Linear(1, 1, device="meta")}, "meta device"),
        ({"model": nn.LazyLinear(2)}, "the tensor at (weight|bias) was not made yet"),
        ({"strict": 1}, "'strict' is an option of load"),
        ({"rng": 1}, "'rng'"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_what_can_t_be_saved_is_refused_before_anything_is_written(tmp_path: Path, what: Any, named: str) -> None:
    path = everygpu.save(tmp_path / "ckpt", epoch=1)
    with pytest.raises(CheckpointContentError, match=named):
        everygpu.save(path, **what)
    assert everygpu.load(path) == {"epoch": 1}
    assert names_in(tmp_path) == {"ckpt"}
    with pytest.raises(TypeError):
        everygpu.save(tmp_path / "other", **what)
    assert names_in(tmp_path) == {"ckpt"}


def test_extras_of_all_kinds_come_back(tmp_path: Path) -> None:
    extras = {
        "epoch": 3,
        "losses": [0.5, float("nan"), float("-inf")],
        "shape": (1, (2, 3)),
        "by_class": {0: "cat", 1: "dog", None: True},
        "confusion": torch.eye(3, dtype=torch.bfloat16),
        "nested": {"deep": [{"tensor": torch.tensor(3)}]},
        "best": np.float32(0.25),
        "path": None,
    }
    del extras["path"]
    back = everygpu.load(everygpu.save(tmp_path / "ckpt", **extras))
    assert same_state(back, extras | {"best": 0.25})


def test_returned_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    path = everygpu.save(tmp_path / "ckpt", x=torch.arange(4), y=np.arange(3))
    back = everygpu.load(path)
    with open(path / "training.safetensors", "r+b") as file:
        file.write(b"\xff" * os.path.getsize(file.name))
    back["y"][0] = 7
    assert back["x"].tolist() == [0, 1, 2, 3]
    assert back["y"].tolist() == [7, 1, 2]


def test_nothing_to_save_or_to_load_into_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="nothing to save"):
        everygpu.save(tmp_path / "a", model=None)
    assert os.listdir(tmp_path) == []
    everygpu.save(tmp_path / "a", model=nn.Linear(1, 1))
    with pytest.raises(OptionError, match="nothing to load into"):
        everygpu.load(tmp_path / "a")
    assert everygpu.load(tmp_path / "a", rng=True) == {}
    everygpu.save(tmp_path / "b", extras=1, misplaced=2)
    assert everygpu.load(tmp_path / "b") == {"extras": 1, "misplaced": 2}


def test_digests_are_right_where_threads_begin_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        calls.append(thread)
        if len(calls) % 3 == 2:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(9):
        path = everygpu.save(tmp_path / "ckpt", model=nn.Linear(600, 600), x=torch.ones(300_000), y=torch.zeros(7))
        assert everygpu.load(path)["y"].sum() == 0
