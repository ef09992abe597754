"""Loading: into any wrapper and device, nothing changed unless everything fits, damage noticed and named."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everygpu
from everygpu.devices.seed import take_rng_states
from everygpu.errors import (
    CheckpointContentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointForeignError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from tests.checkpoint.forge import edit_document, edit_part
from tests.checkpoint.models import Net, same_state, snapshot

# By name: the package's attribute ``load`` is the function.
contents = import_module("everygpu.checkpoint.load")


class Run:
    """A model with everything that is trained with it."""

    def __init__(self, seed: int, steps: int = 0) -> None:
        self.model = Net(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.shuffle = torch.Generator().manual_seed(seed)
        self.ema = Net(seed + 100)
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(4, 4)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "shuffle": self.shuffle,
            "ema": self.ema,
        }

    def state(self) -> list[object]:
        return [
            *snapshot(self.model, self.optimizer, self.scheduler, self.ema),
            self.shuffle.get_state(),
            torch.get_rng_state(),
        ]


@pytest.fixture
def source() -> Run:
    return Run(seed=1, steps=2)


@pytest.fixture
def path(tmp_path: Path, source: Run) -> Path:
    return everygpu.save(tmp_path / "ckpt", **source.parts(), epoch=3)


def assert_nothing_changes(error: type[Exception], path: Path, match: str, **what: Any) -> None:
    """A load into a whole run raises the error and leaves every part of the run as it was."""
    target = Run(seed=2, steps=1)
    before = target.state()
    with pytest.raises(error, match=match):
        everygpu.load(path, rng=True, **target.parts() | what)
    assert same_state(target.state(), before)


def test_every_part_comes_back(path: Path, source: Run) -> None:
    target = Run(seed=2)
    assert everygpu.load(path, **target.parts()) == {"epoch": 3}
    with open(path / "training.safetensors", "r+b") as file:  # on which nothing depends any more
        file.write(b"\xff" * os.path.getsize(file.name))
    assert same_state(target.state(), source.state())


def test_stateful_extras_that_are_not_asked_for_come_back_as_their_state(path: Path, source: Run) -> None:
    rest = everygpu.load(path)
    assert rest.keys() == {"epoch", "shuffle", "ema"}
    assert torch.equal(rest["shuffle"], source.shuffle.get_state())
    target = Net(7)
    target.load_state_dict(rest["ema"])
    assert same_state(dict(target.state_dict()), dict(source.ema.state_dict()))


def test_random_states_come_back_only_when_asked_for(path: Path) -> None:
    expected = torch.randn(2)
    torch.manual_seed(0)
    unchanged = torch.get_rng_state()
    everygpu.load(path)
    assert torch.equal(torch.get_rng_state(), unchanged)
    everygpu.load(path, rng=True)
    assert torch.equal(torch.randn(2), expected)


def test_a_wrapper_nobody_knows_is_seen_through(tmp_path: Path) -> None:
    class Custom(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    everygpu.load(everygpu.save(tmp_path / "a", model=Custom(source)), model=target)
    assert torch.equal(target.weight, source.weight)
    back = Custom(nn.Linear(2, 2))
    everygpu.load(everygpu.save(tmp_path / "b", model=target), model=back)
    assert torch.equal(back.module.weight, source.weight)


def test_any_device_loads_from_any_other(tmp_path: Path, devices) -> None:
    device = devices(2)[-1]
    source, target = Run(seed=1, steps=2), Run(seed=2)
    source.model.to(device)
    target.model.to(device)
    target.optimizer = torch.optim.AdamW(target.model.parameters())
    path = everygpu.save(tmp_path / "ckpt", model=source.model, optimizer=source.optimizer, x=torch.ones(2).to(device))
    rest = everygpu.load(path, model=target.model, optimizer=target.optimizer)
    for parameter, state in target.optimizer.state.items():
        assert state["exp_avg"].device == parameter.device == device
        assert state["step"].device.type == "cpu"
    assert same_state(dict(target.model.state_dict()), dict(source.model.state_dict()))
    assert rest["x"].device.type == "cpu"


# What is at the path.


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": None},
        {"parts": {"model": {}}},
        {"parts": {"model": {"kind": "module", "state": {}}}},
        {"parts": {"model": {"kind": "module", "state": {"values": [], "versions": {}}}}},
        {"parts": {"model": {"kind": "module", "state": {"values": {"w": {"$tensor": "gone"}}, "versions": {}}}}},
        {"parts": {"model": {"kind": "module", "state": {"values": {}, "versions": {"": 2}}}}},
        {"parts": {"optimizer": {"kind": "pickle", "state": {"$unknown": 1}}}},
        {"parts": {"optimizer": {"kind": "pickle", "state": {}}}},
        {"parts": {"scheduler": {"kind": "state_dict", "state": {"$tuple": 5}}}},
        {"parts": {"scheduler": {"kind": "state_dict", "class": 3, "state": {}}}},
        {"parts": []},
        {"parts": {"a": {"kind": ["plain"], "state": 1}}},
        {"rng": {"$tensor": "x"}},
        {"run": {"step": "x"}},
    ],
    ids=str,
)
def test_a_state_of_another_structure_is_damage(path: Path, changes: dict[str, Any]) -> None:
    edit_document(path, **changes)
    assert_nothing_changes(CheckpointDamagedError, path, r"checkpoint\.json")


# What the targets are.


def sgd(run: Run) -> Any:
    return torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)


def adam(run: Run) -> Any:
    return torch.optim.Adam(run.model.parameters(), weight_decay=0.5)


def cosine(run: Run) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 10)


@pytest.mark.parametrize(
    ("name", "make", "saved", "is_named"),
    [
        ("optimizer", sgd, "sgd.SGD, and the saved state of .*AdamW", True),
        ("optimizer", adam, "adam.Adam, and the saved state of .*AdamW", True),
        ("optimizer", sgd, "another class, without dampening, momentum, nesterov", False),
        ("scheduler", cosine, "CosineAnnealingLR, and the saved state of .*StepLR", True),
    ],
)
def test_the_state_of_another_class(path: Path, name: str, make: Any, saved: str, is_named: bool) -> None:
    if not is_named:
        edit_part(path, name, **{"class": None})
    target = make(Run(seed=2))
    before = snapshot(target)
    assert_nothing_changes(CheckpointMismatchError, path, saved, **{name: target})
    assert same_state(snapshot(target), before)


def test_an_optimizer_s_state_goes_to_the_parameters_by_name(path: Path, source: Run) -> None:
    target = Run(seed=2)
    target.optimizer = torch.optim.AdamW(reversed([*target.model.parameters()]), lr=0.1)
    everygpu.load(path, model=target.model, optimizer=target.optimizer)
    own = dict(source.model.named_parameters())
    for name, parameter in target.model.named_parameters():
        assert same_state(dict(target.optimizer.state[parameter]), dict(source.optimizer.state[own[name]]))


def test_parameters_in_other_groups_are_refused(tmp_path: Path) -> None:
    def make(model: nn.Module, order: tuple[str, ...]) -> torch.optim.Optimizer:
        groups = [{"params": [model.get_parameter(name)]} for name in order]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    source, target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = make(source, ("0.weight", "1.weight"))
    source(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    path = everygpu.save(tmp_path / "ckpt", model=source, optimizer=optimizer)
    other = make(target, ("1.weight", "0.weight"))
    before = snapshot(target, other)
    with pytest.raises(CheckpointMismatchError, match=r"other parameters, .* the saved group of 0\.weight"):
        everygpu.load(path, model=target, optimizer=other)
    assert same_state(snapshot(target, other), before)


def test_two_optimizers_of_two_models(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        models = {"G": Net(seed), "D": Net(seed + 1)}
        return models | {f"opt_{name}": torch.optim.AdamW(model.parameters()) for name, model in models.items()}

    source, target = make(1), make(5)
    for name in "GD":
        source[name](torch.ones(4, 4)).sum().backward()
        source[f"opt_{name}"].step()
    path = everygpu.save(tmp_path / "ckpt", **source)
    everygpu.load(path, **target)
    assert same_state(snapshot(*target.values()), snapshot(*source.values()))
    with pytest.raises(CheckpointMismatchError, match="opt_D has other parameters"):
        everygpu.load(path, **target | {"opt_D": target["opt_G"]})


def other_net() -> Net:
    model = Net()
    model.module = nn.Linear(3, 3)
    return model


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ({"model": other_net()}, r"module\.weight: \(6, 6\)"),
        ({"model": other_net(), "strict": False}, r"module\.weight: \(6, 6\)"),
        ({"ema": nn.Linear(1, 1)}, "ema has other names and shapes"),
        ({"optimizer": torch.optim.AdamW(nn.Linear(1, 1).parameters())}, r"\[5\] parameters, got \[2\]"),
        ({"epoch": torch.Generator()}, "epoch was saved as a plain"),
        ({"shufle": torch.Generator()}, r"shufle\. .*Did you mean shuffle\?"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_does_not_fit_changes_nothing(path: Path, what: dict[str, Any], match: str) -> None:
    assert_nothing_changes(CheckpointMismatchError, path, match, **what)
    with pytest.raises(CheckpointMismatchError, match="Pass the model as well"):
        everygpu.load(path, optimizer=Run(seed=2).optimizer)


def test_what_is_no_checkpoint_changes_nothing(path: Path, tmp_path: Path) -> None:
    assert_nothing_changes(CheckpointNotFoundError, tmp_path / "none", "No checkpoint at .*none")
    (tmp_path / "x" / "notes").mkdir(parents=True)
    assert_nothing_changes(CheckpointForeignError, tmp_path / "x", "holds no checkpoint: none of checkpoint.json")
    (tmp_path / "model.pt").write_bytes(b"something else")
    assert_nothing_changes(CheckpointForeignError, tmp_path / "model.pt", "has no known format")
    edit_document(path, version=99)
    assert_nothing_changes(CheckpointForeignError, path, "version 99")


@pytest.mark.parametrize("part", ["model", "optimizer", "scheduler"])
def test_a_part_that_was_not_saved(tmp_path: Path, source: Run, part: str) -> None:
    parts = source.parts()
    del parts[part]
    path = everygpu.save(tmp_path / "partial", **parts)
    assert_nothing_changes(CheckpointMismatchError, path, f"no part named {part}|no model in it")


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"epoch": 0}, "epoch must be an object to restore in place, got int"),
        ({"model": {}}, r"model must be a torch\.nn\.Module, got dict"),
        ({"optimizer": Net}, "optimizer must be an object"),
        ({"scheduler": torch.Generator()}, "scheduler must be an object"),
    ],
)
def test_a_target_that_can_t_be_loaded_into(path: Path, what: dict[str, Any], named: str) -> None:
    assert_nothing_changes(CheckpointContentError, path, named, **what)


# While a save goes on.


@pytest.mark.parametrize("num_saves", [1, 9])
def test_one_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_saves: int
) -> None:
    path = everygpu.save(tmp_path / "ckpt", value=0, model=Net(0))
    real, target, replaced = contents.read_tensors, Net(99), []

    def read_late(*args: Any) -> Any:
        if len(replaced) < 2 * num_saves:  # of the model and of the rest
            replaced.append(everygpu.save(path, value=len(replaced), model=Net(len(replaced))))
        return real(*args)

    monkeypatch.setattr(contents, "read_tensors", read_late)
    if num_saves == 9:
        with pytest.raises(CheckpointError, match="was replaced 5 times"):
            everygpu.load(path, model=target)
        return
    assert everygpu.load(path, model=target) == {"value": 1}
    assert same_state(dict(target.state_dict()), dict(Net(1).state_dict()))


@pytest.mark.parametrize(
    "change",
    [*({"python": bad} for bad in (None, (3, (1, 2), None))), {"torch": b"short"}, {"cuda": [3]}, {"numpy": None}],
    ids=str,
)
def test_broken_random_states_are_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    states = take_rng_states() | change
    monkeypatch.setattr(import_module("everygpu.checkpoint.save"), "take_rng_states", lambda: states)
    everygpu.save(tmp_path / "c", epoch=1)
    with pytest.raises(CheckpointDamagedError, match="random states"):
        everygpu.load(tmp_path / "c", rng=True)
