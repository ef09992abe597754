"""What a capture was made from is compared in every step; what can't be compared is named."""

import copy
import enum
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import everygpu
from everygpu.parallel.cuda_graphs.executed_code import ExecutedCode
from everygpu.parallel.cuda_graphs.guards import ModuleGuards


class Kind(enum.Enum):
    FIRST = 1


class Settings:
    """An object of a class of the user's."""

    def __init__(self) -> None:
        self.scale = 1
        self.layers = {"first": [1, 2]}


@dataclass
class Recorder:
    """As transformers has them: what a model may return besides."""

    kind: type
    index: int = 0
    names: list[str] = field(default_factory=list)


class Model(nn.Module):
    """With attributes of the kinds that models of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 3))
        self.classes = {"hidden_states": nn.Linear, "attentions": [nn.Conv1d, Recorder(nn.LSTM)]}
        self.plan = {"body": (["x"], ["y"]), "kinds": [Kind.FIRST, torch.float32]}
        self.settings = Settings()
        self.weights = [self.body[0].weight]
        self.register_buffer("positions", torch.ones(2))
        self.original_positions = self.positions


def guards_of(*roots: nn.Module) -> ModuleGuards:
    return ModuleGuards(list(roots), [], ExecutedCode())


def test_what_python_notes_in_a_class_at_a_first_look_is_no_change() -> None:
    class Config:
        def __init__(self) -> None:
            self.scale = 1.0

    model = nn.Linear(2, 2)
    model.config = Config()
    guards = guards_of(model)
    copy.copy(model.config)
    assert Config.__annotations__ == {}
    assert guards.is_current([model], [])
    model.config.scale = 2.0
    assert not guards.is_current([model], [])


def test_of_a_lock_it_is_seen_whether_it_is_held() -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    guards = guards_of(model)
    assert guards.state is not None
    assert guards.state.unseen is None
    with model.lock:
        assert not guards.is_current([model], [])
    assert guards.is_current([model], [])


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_tensor_or_a_module_in_the_place_of_another_is_seen(is_wrapped: bool) -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = nn.Sequential(nn.Linear(2, 2), everygpu.DataParallel(inner, ["cpu"]) if is_wrapped else inner)
    changes = [
        lambda: setattr(inner[0], "weight", nn.Parameter(torch.ones(2, 2))),
        lambda: setattr(inner[1], "running_mean", torch.ones(2)),
        lambda: inner.append(nn.Linear(2, 2)),
        lambda: model.append(nn.Linear(2, 2)),
        lambda: model[1].register_module("module" if is_wrapped else "0", nn.Linear(2, 2)),
    ]
    for change in changes:
        guards = guards_of(model)
        assert guards.is_current([model], [])
        change()
        assert not guards.is_current([model], [])


def test_models_of_these_kinds_can_be_captured() -> None:
    model = Model()
    guards = guards_of(model)
    assert guards.state is not None
    assert guards.state.unseen is None
    assert guards.find_copied() is None
    assert guards.is_current([model], [])
    assert guards.is_current([model], [])


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.classes["attentions"][1].names.append("new"),  # more: test_reached_state.py
        lambda m: m.weights.append(m.weights[0]),
        lambda m: m.weights.__setitem__(0, m.body[0].bias),
        lambda m: setattr(m, "original_positions", torch.ones(2)),
        lambda m: setattr(m, "positions", torch.ones(2)),
        lambda m: m.body[1]._flat_weights.reverse(),
        lambda m: m.body[1]._all_weights[0].reverse(),
        lambda m: setattr(m.body[1], "weight_hh_l0", nn.Parameter(torch.ones(12, 3))),
        lambda m: m.body[1]._parameters.update(weight_hh_l0=nn.Parameter(torch.ones(12, 3))),
        lambda m: setattr(m.body[1].weight_hh_l0, "data", torch.ones(12, 3)),
        lambda m: m.body[1]._apply(lambda t: t.double()),
        lambda m: m.body[0].weight.requires_grad_(False),
    ],
)
def test_a_change_is_noticed(change: Any) -> None:
    model = Model()
    guards = guards_of(model)
    change(model)
    assert not guards.is_current([model], [])


def test_a_list_that_keeps_a_replaced_parameter_is_copied_for_each_replica() -> None:
    model = Model()
    assert guards_of(model).find_copied() is None
    model.body[0].weight = nn.Parameter(torch.ones(2, 2))
    assert guards_of(model).find_copied() == (
        "Model has a tensor that isn't registered, which each replica has a copy of: weights"
    )


def test_a_loss_may_hold_tensors_of_the_model() -> None:
    model, loss = Model(), nn.MSELoss()
    loss.regularized = [model.body[0].weight, weakly := [model.body]]
    guards = guards_of(model, loss)
    assert guards.find_copied() is None
    assert guards.is_current([model, loss], [])
    weakly.clear()
    assert not guards.is_current([model, loss], [])
