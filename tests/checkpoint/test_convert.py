"""Converting: every format into every other, nothing lost silently, nothing half-written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import everygpu
from everygpu.checkpoint import directory
from everygpu.checkpoint.convert import convert
from everygpu.errors import (
    CheckpointBusyError,
    CheckpointContentError,
    CheckpointMismatchError,
    OptionError,
)
from tests.checkpoint.models import Net, same_state, snapshot
from tests.checkpoint.test_dcp import write_dcp

TARGETS = ["b.pt", "b.safetensors"]


def make_native(path: Path, model: nn.Module) -> None:
    everygpu.save(path, model=model)


def make_torch(path: Path, model: nn.Module) -> None:
    torch.save(model.state_dict(), path)


def make_safetensors(path: Path, model: nn.Module) -> None:
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path)


def make_dcp(path: Path, model: nn.Module) -> None:
    write_dcp(path, {"model": model.state_dict()})


MAKERS: list[Callable[[Path, nn.Module], None]] = [make_native, make_torch, make_safetensors, make_dcp]


def names_in(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


@pytest.mark.parametrize("make", MAKERS, ids=[make.__name__ for make in MAKERS])
@pytest.mark.parametrize("name", TARGETS)
def test_every_format_into_a_file_that_others_read(tmp_path: Path, make: Any, name: str) -> None:
    source, model = Net(1), Net(2)
    make(tmp_path / "a", source)
    outcome = convert(tmp_path / "a", tmp_path / name)
    assert (outcome.num_tensors, outcome.left_out) == (len(source.state_dict()), ())
    assert names_in(tmp_path) == {"a", name}
    expected = dict(source.state_dict())
    if name == "b.safetensors":
        assert same_state(load_file(tmp_path / name), expected)
    else:
        loaded = torch.load(tmp_path / name, weights_only=True)
        assert same_state(dict(loaded), expected)
    everygpu.load(tmp_path / name, model=model)
    assert same_state(snapshot(model), snapshot(source))


@pytest.mark.parametrize("name", ["b.onnx", "b", "b.gguf"])
def test_a_name_of_no_known_format_is_refused(tmp_path: Path, name: str) -> None:
    torch.save(Net(1).state_dict(), tmp_path / "a.pt")
    with pytest.raises(OptionError, match=r"which belongs to no known format. Choose one of \.pt"):
        convert(tmp_path / "a.pt", tmp_path / name)
    assert names_in(tmp_path) == {"a.pt"}


@pytest.mark.parametrize("name", TARGETS)
def test_a_destination_that_is_taken_is_only_replaced_when_asked_to(tmp_path: Path, name: str) -> None:
    torch.save(Net(1).state_dict(), tmp_path / "a.pt")
    torch.save(Net(2).state_dict(), tmp_path / "c.pt")
    convert(tmp_path / "a.pt", tmp_path / name)
    with pytest.raises(OptionError, match="Pass --overwrite"):
        convert(tmp_path / "c.pt", tmp_path / name)
    convert(tmp_path / "c.pt", tmp_path / name, overwrite=True)
    model = Net(3)
    everygpu.load(tmp_path / name, model=model)
    assert same_state(snapshot(model), snapshot(Net(2)))
    assert names_in(tmp_path) == {"a.pt", "c.pt", name}


def test_a_prefix_that_no_name_has_is_a_wrong_option(tmp_path: Path) -> None:
    torch.save({"model.w": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(OptionError, match="They begin with 'model.'"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", strip_prefix="modle.")


def test_a_section_of_ours_and_of_others(tmp_path: Path) -> None:
    everygpu.save(tmp_path / "a", model=Net(1), ema=Net(2))
    torch.save({"model": Net(1).state_dict(), "ema": Net(2).state_dict()}, tmp_path / "a.pt")
    for name in ("a", "a.pt"):
        convert(tmp_path / name, tmp_path / f"{name}.safetensors", section="ema")
        assert same_state(load_file(tmp_path / f"{name}.safetensors"), dict(Net(2).state_dict()))
        with pytest.raises(CheckpointMismatchError, match="'eam' is no"):
            convert(tmp_path / name, tmp_path / "c.pt", section="eam")


def test_small_parts_of_large_memory_are_written_alone(tmp_path: Path) -> None:
    base = torch.zeros(100_000)
    torch.save({"w": base[:4], "v": base[4:8]}, tmp_path / "a.pt")
    for name in ("b.pt", "b.safetensors"):
        convert(tmp_path / "a.pt", tmp_path / name)
        assert (tmp_path / name).stat().st_size < 5_000


def test_a_living_conversion_to_the_same_file_goes_on(tmp_path: Path) -> None:
    torch.save(Net(1).state_dict(), tmp_path / "a.pt")
    with directory.replacing(tmp_path / "b.pt", is_file=True) as temporary:
        with pytest.raises(CheckpointBusyError, match="^Another saver is writing"):
            convert(tmp_path / "a.pt", tmp_path / "b.pt")
        torch.save(Net(2).state_dict(), temporary)
    assert names_in(tmp_path) == {"a.pt", "b.pt"}


# Some versions of torch say that they check them, some that they don't.
@pytest.mark.filterwarnings("ignore:.*[sS]parse")
def test_tensors_that_a_format_has_no_word_for(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, dtype=torch.complex128)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointContentError, match="complex128, which safetensors lacks"):
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    torch.save({"w": torch.eye(2).to_sparse()}, tmp_path / "s.pt")
    with pytest.raises(CheckpointContentError, match="layout"):
        convert(tmp_path / "s.pt", tmp_path / "b.safetensors")
    assert names_in(tmp_path) == {"a.pt", "s.pt"}


def test_extra_state_is_kept_or_named(tmp_path: Path) -> None:
    torch.save({"m.w": torch.ones(1), "m._extra_state": {"calls": 3}}, tmp_path / "a.pt")
    assert convert(tmp_path / "a.pt", tmp_path / "b.pt").left_out == ()
    assert torch.load(tmp_path / "b.pt") == {"m.w": torch.ones(1), "m._extra_state": {"calls": 3}}
    assert convert(tmp_path / "b.pt", tmp_path / "c.safetensors").left_out == ("'m._extra_state'",)


def test_no_model(tmp_path: Path) -> None:
    everygpu.save(tmp_path / "a", epoch=3)
    torch.save({"epoch": 3}, tmp_path / "a.pt")
    for name in ("a", "a.pt"):
        with pytest.raises(CheckpointMismatchError, match="has no model in it|in it, and no tensors"):
            convert(tmp_path / name, tmp_path / "b.pt")
    assert names_in(tmp_path) == {"a", "a.pt"}
