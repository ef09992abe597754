"""The manifest: what it promises about the files beside it is checked; nothing in it is trusted."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everygpu.checkpoint.manifest import (
    FORMAT_NAME,
    FORMAT_VERSION,
    describe_files,
    manifest_to_json,
    read_json,
    read_manifest,
)
from everygpu.errors import CheckpointDamagedError, CheckpointError, CheckpointForeignError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "state.json").write_text("{}\n")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10)
    manifest = describe_files(tmp_path, ["state.json", "model.safetensors"])
    (tmp_path / "manifest.json").write_text(manifest_to_json(manifest))
    return tmp_path


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_it_says_what_it_is_and_what_wrote_it(directory: Path) -> None:
    document = json.loads((directory / "manifest.json").read_text())
    assert document["format"] == FORMAT_NAME
    assert document["version"] == FORMAT_VERSION
    assert document["files"]["model.safetensors"] == {"size_bytes": 10, "sha256": None}
    assert {"python", "torch", "safetensors"} <= document["libraries"].keys()


def test_reading_gives_what_was_written(directory: Path) -> None:
    manifest = read_manifest(directory)
    assert {name: record.size_bytes for name, record in manifest.files.items()} == {
        "state.json": 3,
        "model.safetensors": 10,
    }
    assert manifest == describe_files(directory, ["state.json", "model.safetensors"])


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
def test_another_size_is_damage(directory: Path, name: str) -> None:
    with open(directory / name, "ab") as file:
        file.write(b"!")
    with pytest.raises(CheckpointDamagedError, match=name):
        read_manifest(directory)


@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "manifest.json"])
def test_a_missing_file_is_damage(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(CheckpointDamagedError, match=name):
        read_manifest(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "\x00", "[" * 100_000])
def test_an_unreadable_manifest_is_damage(directory: Path, text: str) -> None:
    (directory / "manifest.json").write_text(text)
    with pytest.raises(CheckpointDamagedError, match=r"manifest\.json"):
        read_manifest(directory)


def test_a_manifest_that_is_no_text_is_damage(directory: Path) -> None:
    (directory / "manifest.json").write_bytes(b"\x80\x04\x95")
    with pytest.raises(CheckpointDamagedError):
        read_manifest(directory)


@pytest.mark.parametrize("name", [None, "pytorch", 3])
def test_another_format_is_foreign(directory: Path, name: object) -> None:
    edit(directory, format=name)
    with pytest.raises(CheckpointForeignError):
        read_manifest(directory)


def test_a_newer_version_is_foreign_and_says_so(directory: Path) -> None:
    edit(directory, version=FORMAT_VERSION + 1)
    with pytest.raises(CheckpointForeignError, match=r"Upgrade everygpu"):
        read_manifest(directory)


@pytest.mark.parametrize("version", [None, "1", 1.0, True, 0, -1])
def test_a_version_that_is_none_is_damage(directory: Path, version: object) -> None:
    edit(directory, version=version)
    with pytest.raises(CheckpointDamagedError, match="version"):
        read_manifest(directory)


@pytest.mark.parametrize(
    "files",
    [
        None,
        [],
        {},
        {"model.safetensors": {"size_bytes": 10}},
        {"state.json": None},
        {"state.json": {"size_bytes": "3"}},
        {"state.json": {"size_bytes": True}},
        {"state.json": {"size_bytes": 3, "sha256": 5}},
        {"state.json": {"size_bytes": 3}, "../state.json": {"size_bytes": 3}},
        {"state.json": {"size_bytes": 3}, "manifest.json": {"size_bytes": 3}},
    ],
)
def test_a_file_list_that_is_none_is_damage(directory: Path, files: object) -> None:
    edit(directory, files=files)
    with pytest.raises(CheckpointDamagedError, match=r"manifest\.json"):
        read_manifest(directory)


def test_a_manifest_without_digests_or_libraries_is_read(directory: Path) -> None:
    edit(directory, files={"state.json": {"size_bytes": 3}}, libraries=None)
    assert read_manifest(directory).files["state.json"].sha256 is None


def test_a_directory_of_something_else_is_foreign(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(CheckpointForeignError, match="neither"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"["])
def test_read_json_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match=r"state\.json"):
        read_json(tmp_path / "state.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(key=st.sampled_from(["format", "version", "files", "libraries"]), value=json_values)
def test_a_manifest_with_anything_in_it_gives_a_typed_error_or_is_read(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / "state.json").write_text("{}\n")
    (directory / "manifest.json").write_text(manifest_to_json(describe_files(directory, ["state.json"])))
    edit(directory, **{key: value})
    try:
        read_manifest(directory)
    except CheckpointError:
        assert key != "libraries"
    else:
        assert key == "libraries"
