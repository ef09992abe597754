"""Pickles that would run code, in the place of any file and beside them; manifests that are anything."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import everygpu
from everygpu.errors import CheckpointError
from tests.checkpoint.forge import agree, edit_document
from tests.faults.savers import Weights
from tests.faults.test_damage import FILES


class Poison:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def write_plain(path: Path, poison: Poison) -> None:
    path.write_bytes(pickle.dumps(poison))


def write_torch(path: Path, poison: Poison) -> None:
    with open(path, "wb") as file:  # by name, torch refuses one that begins with a dot
        torch.save({"model": poison}, file)


def write_legacy(path: Path, poison: Poison) -> None:
    torch.save({"model": poison}, path, _use_new_zipfile_serialization=False)


def write_zip(path: Path, poison: Poison) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(poison))


POISONS: list[Callable[[Path, Poison], None]] = [write_plain, write_torch, write_legacy, write_zip]


def save(path: Path) -> Path:
    model = Weights(1, 64)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    (model.first.sum() + model.second.sum()).backward()
    optimizer.step()
    return everygpu.save(path, model=model, optimizer=optimizer, x=torch.ones(3))


def load(path: Path, **options: Any) -> dict[str, Any]:
    model = Weights(2, 64)
    return everygpu.load(path, model=model, optimizer=torch.optim.SGD(model.parameters()), rng=True, **options)


@pytest.mark.parametrize("write", POISONS)
def test_the_poison_is_poison(tmp_path: Path, write: Callable[[Path, Poison], None]) -> None:
    """The tests below would notice if it were unpickled."""
    write(tmp_path / "x", Poison(tmp_path / "marker"))
    if write in (write_plain, write_zip):
        data = (tmp_path / "x").read_bytes()
        pickle.loads(data if write is write_plain else zipfile.ZipFile(tmp_path / "x").read("archive/data.pkl"))
    else:
        torch.load(tmp_path / "x", weights_only=False)
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("write", POISONS)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("options", [{}, {"verify": False}], ids=["verified", "not verified"])
def test_a_pickle_in_a_file_s_place_is_not_executed(
    tmp_path: Path, write: Callable[[Path, Poison], None], name: str, options: dict[str, Any]
) -> None:
    path = save(tmp_path / "ckpt")
    write(path / name, Poison(tmp_path / "marker"))
    for with_agreeing_sums in (False, name != "SHA256SUMS"):
        if with_agreeing_sums:
            agree(path)
        if options and name == "SHA256SUMS":  # it is not read
            assert load(path, **options)["x"].tolist() == [1, 1, 1]
            continue
        with pytest.raises(CheckpointError, match=name):
            load(path, **options)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("write", POISONS)
@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "optimizer.pkl", ".metadata", "data.pkl"])
def test_a_pickle_beside_the_files_is_not_touched(
    tmp_path: Path, write: Callable[[Path, Poison], None], name: str
) -> None:
    path = save(tmp_path / "ckpt")
    write(path / name, Poison(tmp_path / "marker"))
    assert load(path)["x"].tolist() == [1, 1, 1]
    assert not (tmp_path / "marker").exists()


def test_pickles_inside_json_are_text(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt")
    text = pickle.dumps(Poison(tmp_path / "marker"), protocol=0).decode("latin-1")
    parts = json.loads((path / "checkpoint.json").read_text())["parts"]
    edit_document(path, parts={**parts, "x": {"kind": "plain", "state": text}})
    assert load(path)["x"] == text
    assert not (tmp_path / "marker").exists()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("a$./é\0", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a$./é\0", max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("fuzz") / "ckpt")


def load_with_document(checkpoint: Path, content: bytes) -> bool:
    """Load with another checkpoint.json; tell whether that worked. Anything but a typed error is raised."""
    path = checkpoint / "checkpoint.json"
    original = path.read_bytes()
    path.write_bytes(content)
    agree(checkpoint)
    try:
        load(checkpoint)
    except CheckpointError:
        return False
    finally:
        path.write_bytes(original)
        agree(checkpoint)
    return True


@settings(max_examples=50)
@given(content=st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_a_document_of_anything_is_a_typed_error(checkpoint: Path, content: bytes) -> None:
    assert not load_with_document(checkpoint, content)


@settings(max_examples=100)
@given(data=st.data())
def test_a_document_with_anything_in_it_and_the_right_digest_is_a_typed_error_or_loads(
    checkpoint: Path, data: st.DataObject
) -> None:
    """As somebody would write it who means harm: any entry at any depth replaced."""
    document = json.loads((checkpoint / "checkpoint.json").read_text())
    place = document
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(json_values)
    loaded = load_with_document(checkpoint, json.dumps(document).encode())
    assert loaded is False or key not in ("format", "version", "files")
