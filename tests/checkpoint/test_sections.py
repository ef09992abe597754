"""Which part of a file is the model, which the optimizer, and what is said when that isn't clear."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from everygpu.checkpoint.foreign.sections import MODEL_NAMES, find_state, is_state, sort_document
from torch import nn

from everygpu.errors import CheckpointMismatchError

W = {"layer.weight": torch.ones(2, 2), "layer.bias": torch.ones(2)}
EMA = {"layer.weight": torch.zeros(2, 2), "layer.bias": torch.zeros(2)}


def optimizer_state(lr: float = 0.5) -> dict[str, Any]:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr).state_dict()


def test_a_state_dict_is_the_model() -> None:
    found = sort_document(W, "x")
    assert found.model == W
    assert found.section == ""
    assert found.notes == ()


def test_plain_values_beside_the_tensors_come_back() -> None:
    found = sort_document(W | {"epoch": 3}, "x")
    assert found.model == W
    assert found.extras == {"epoch": 3}


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_model_under_every_usual_name(name: str) -> None:
    found = sort_document({"epoch": 7, "best": torch.tensor(0.5), name: W}, "x")
    assert found.model == W
    assert found.section == name
    assert found.extras.keys() == {"epoch", "best"}
    assert found.notes == ()


def test_several_models_are_chosen_from_in_the_documented_order_and_it_is_said() -> None:
    found = sort_document({"ema": EMA, "model": W, "other": EMA}, "x")
    assert found.model == W
    assert found.extras.keys() == {"ema", "other"}
    assert found.notes == ("the model is taken from 'model'; there is also 'ema', 'other'",)


def test_a_section_can_be_chosen() -> None:
    found = sort_document({"ema": EMA, "model": W}, "x", "ema")
    assert found.model == EMA
    assert found.extras == {"model": W}


@pytest.mark.parametrize("section", ["eam", "model.layer", "epoch", "model.layer.weight"])
def test_a_section_that_is_none_is_refused(section: str) -> None:
    with pytest.raises(CheckpointMismatchError, match="section must be a state dict"):
        sort_document({"ema": EMA, "model": W, "epoch": 3}, "x", section)


def test_a_model_one_level_deeper_is_found() -> None:
    found = sort_document({"model": {"state_dict": W, "config": {}}}, "x")
    assert found.model == W
    assert found.section == "model.state_dict"


def test_one_model_under_an_unusual_name_is_taken() -> None:
    assert sort_document({"backbone": W, "epoch": 3}, "x").model == W


def test_several_models_under_unusual_names_are_not_guessed() -> None:
    found = sort_document({"G": W, "D": EMA, "epoch": 3}, "x")
    assert found.model is None
    assert found.extras.keys() == {"G", "D", "epoch"}
    with pytest.raises(CheckpointMismatchError, match=r"'D', 'G'|'G', 'D'.*G=module"):
        found.require_model("gan.pt")


@pytest.mark.parametrize("document", [{}, {"epoch": 3}, [torch.ones(2)], torch.ones(2), 5, None, {"a": []}], ids=str)
def test_no_model(document: Any) -> None:
    found = sort_document(document, "x")
    assert found.model is None
    with pytest.raises(CheckpointMismatchError, match="must hold one model's state dict, got p with"):
        found.require_model("p")


@pytest.mark.parametrize("name", ["optimizer", "optimizer_state_dict", "optim"])
def test_the_optimizer_is_recognised(name: str) -> None:
    found = sort_document({"model": W, name: optimizer_state(), "step": 4}, "x")
    assert found.optimizer == optimizer_state()
    assert found.extras == {"step": 4}


def test_lightning_has_lists_of_one() -> None:
    found = sort_document(
        {"state_dict": W, "optimizer_states": [optimizer_state()], "lr_schedulers": [{"last_epoch": 2}], "epoch": 1},
        "x",
    )
    assert found.optimizer == optimizer_state()
    assert found.scheduler == {"last_epoch": 2}
    assert found.extras == {"epoch": 1}


def test_several_optimizers_are_left_in_the_rest() -> None:
    found = sort_document({"state_dict": W, "optimizer_states": [optimizer_state(), optimizer_state()]}, "x")
    assert found.optimizer is None
    assert len(found.extras["optimizer_states"]) == 2


def test_numbers_of_parameters_that_became_text_are_numbers_again() -> None:
    state = optimizer_state() | {"state": {"0": {"step": 1}, "1": {"step": 2}}}
    found = sort_document({"model": W, "optimizer": state}, "x")
    assert found.optimizer["state"] == {0: {"step": 1}, 1: {"step": 2}}


def test_extra_state_of_modules_stays_and_other_values_are_left_out_and_named() -> None:
    state = W | {"layer._extra_state": {"calls": 3, "seen": torch.ones(1)}, "note": "hello"}
    found = sort_document({"model": state}, "x")
    assert found.model is not None
    assert found.model.keys() == W.keys() | {"layer._extra_state"}
    assert found.notes == ("'note' in 'model' is left out: a str, no tensor",)


def test_versions_of_modules_are_kept() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    assert sort_document({"model": state}, "x").versions == {"": {"version": 2}}
    state._metadata = ["broken"]  # type: ignore[attr-defined]
    assert sort_document(state, "x").versions == {}


def test_what_a_state_is() -> None:
    assert is_state(W)
    assert is_state(OrderedDict(W))
    assert not is_state({"a": 1})
    assert not is_state({0: torch.ones(1)})
    assert not is_state({"t": torch.ones(1), "model": W})


def test_a_state_can_be_found_inside_a_value() -> None:
    assert find_state(W) == W
    assert find_state({"step": 1, "state_dict": W}) == W
    assert find_state({"a": W, "b": W}) is None
    assert find_state(3) is None
