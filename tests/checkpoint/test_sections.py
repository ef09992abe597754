"""Which part of a file is the model, which the optimizer, and what is said when that isn't clear."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from everygpu.checkpoint.parts import MODEL_NAMES, Contents, find_state
from everygpu.checkpoint.parts import sort_document as sort_parts
from everygpu.errors import CheckpointMismatchError


def sort_document(document: Any, words: str, section: str | None = None) -> Contents:
    return sort_parts(document, words, section)


def model_of(found: Contents) -> Any:
    return found.require_model("p")


def extras_of(found: Contents) -> dict[str, Any]:
    return {name: part.state for name, part in found.extras.items()}


W = {"layer.weight": torch.ones(2, 2), "layer.bias": torch.ones(2)}
EMA = {"layer.weight": torch.zeros(2, 2), "layer.bias": torch.zeros(2)}


def optimizer_state(lr: float = 0.5) -> dict[str, Any]:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr).state_dict()


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_model_under_every_usual_name(name: str) -> None:
    found = sort_document({"epoch": 7, "best": torch.tensor(0.5), name: W}, "x")
    assert model_of(found) == W
    assert found.section == name
    assert extras_of(found).keys() == {"epoch", "best"}
    assert found.notes == ()


def test_several_models_are_chosen_from_in_the_documented_order_and_it_is_said() -> None:
    found = sort_document({"ema": EMA, "model": W, "other": EMA}, "x")
    assert model_of(found) == W
    assert extras_of(found).keys() == {"ema", "other"}
    assert found.notes == ("the model is taken from 'model'; there is also 'ema', 'other'",)


@pytest.mark.parametrize("section", ["eam", "model.layer", "epoch", "model.layer.weight"])
def test_a_section_that_is_none_is_refused(section: str) -> None:
    with pytest.raises(CheckpointMismatchError, match="is no state dict in the file"):
        sort_document({"ema": EMA, "model": W, "epoch": 3}, "x", section)


def test_a_model_one_level_deeper_is_found() -> None:
    found = sort_document({"model": {"state_dict": W, "config": {}}}, "x")
    assert model_of(found) == W
    assert found.section == "model.state_dict"


@pytest.mark.parametrize("document", [{}, {"epoch": 3}, [torch.ones(2)], torch.ones(2), 5, None, {"a": []}], ids=str)
def test_no_model(document: Any) -> None:
    found = sort_document(document, "x")
    assert "model" not in found.parts
    with pytest.raises(CheckpointMismatchError, match="load: p has .*in it"):
        found.require_model("p")


def test_lightning_has_lists_of_one() -> None:
    found = sort_document(
        {"state_dict": W, "optimizer_states": [optimizer_state()], "lr_schedulers": [{"last_epoch": 2}], "epoch": 1},
        "x",
    )
    assert found.parts["optimizer"].state == optimizer_state()
    assert found.parts["scheduler"].state == {"last_epoch": 2}
    assert extras_of(found) == {"epoch": 1}


def test_numbers_of_parameters_that_became_text_are_numbers_again() -> None:
    state = optimizer_state() | {"state": {"0": {"step": 1}, "1": {"step": 2}}}
    found = sort_document({"model": W, "optimizer": state}, "x")
    assert found.parts["optimizer"].state["state"] == {0: {"step": 1}, 1: {"step": 2}}


def test_extra_state_of_modules_stays_and_other_values_are_left_out_and_named() -> None:
    state = W | {"layer._extra_state": {"calls": 3, "seen": torch.ones(1)}, "note": "hello"}
    found = sort_document({"model": state}, "x")
    assert model_of(found).keys() == W.keys() | {"layer._extra_state"}
    assert found.notes == ("'note' in 'model' is left out: a str, no tensor",)


def test_versions_of_modules_are_kept() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    assert sort_document({"model": state}, "x").parts["model"].state["versions"] == {"": {"version": 2}}
    state._metadata = ["broken"]  # type: ignore[attr-defined]
    assert sort_document(state, "x").parts["model"].state["versions"] == {}


def test_a_state_can_be_found_inside_a_value() -> None:
    assert find_state(W).state["values"] == W
    assert find_state({"step": 1, "state_dict": W}).state["values"] == W
    assert find_state({"a": W, "b": W}) is None
    assert find_state(3) is None


@pytest.mark.parametrize(
    ("document", "section", "extras"),
    [
        (W, None, {}),
        (OrderedDict(W) | {"epoch": 3}, None, {"epoch": 3}),
        ({"backbone": W, "epoch": 3}, None, {"epoch": 3}),
        ({"ema": EMA, "model": W}, "model", {"ema": EMA}),
        ({"t": torch.ones(1), "model": W}, None, {"t": torch.ones(1)}),  # no state, as there is one in it
        *(({"model": W, name: optimizer_state(), "step": 4}, None, {"step": 4}) for name in ("optimizer", "optim")),
    ],
)
def test_the_model_is_told_from_the_rest(document: Any, section: str | None, extras: Any) -> None:
    found = sort_document(document, "x", section)
    assert model_of(found) == W
    assert extras_of(found) == extras
    assert found.notes == ()
