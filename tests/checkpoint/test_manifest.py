"""The manifest: what it promises about the files beside it is checked; nothing in it is trusted."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everygpu.checkpoint import digests
from everygpu.checkpoint import manifest as module
from everygpu.checkpoint.manifest import (
    FORMAT_NAME,
    FORMAT_VERSION,
    Place,
    check_files,
    make_manifest,
    manifest_to_json,
    read_json,
    read_manifest,
)
from everygpu.errors import CheckpointDamagedError, CheckpointError, CheckpointForeignError
from tests.checkpoint.forge import describe_files, edit_json, edit_manifest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "state.json").write_text("{}\n")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10)
    manifest = describe_files(tmp_path, ["state.json", "model.safetensors"])
    (tmp_path / "manifest.json").write_text(manifest_to_json(manifest))
    return tmp_path


def test_it_says_what_it_is_and_what_wrote_it(directory: Path) -> None:
    document = json.loads((directory / "manifest.json").read_text())
    assert document["format"] == FORMAT_NAME
    assert document["version"] == FORMAT_VERSION
    digest = sha256(b"x" * 10).hexdigest()
    assert document["files"]["model.safetensors"] == {"size_bytes": 10, "sha256": [digest]}
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
    edit_manifest(directory, format=name)
    with pytest.raises(CheckpointForeignError):
        read_manifest(directory)


def test_a_newer_version_is_foreign_and_says_so(directory: Path) -> None:
    edit_manifest(directory, version=FORMAT_VERSION + 1)
    with pytest.raises(CheckpointForeignError, match=r"Upgrade everygpu"):
        read_manifest(directory)


@pytest.mark.parametrize("version", [None, "1", 1.0, True, 0, -1])
def test_a_version_that_is_none_is_damage(directory: Path, version: object) -> None:
    edit_manifest(directory, version=version)
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
        {"state.json": {"size_bytes": 3}},
        {"state.json": {"size_bytes": -3, "sha256": []}},
        {"state.json": {"size_bytes": 3, "sha256": []}},
        {"state.json": {"size_bytes": 3, "sha256": [None]}},
        {"state.json": {"size_bytes": 10**400, "sha256": []}},
        {"state.json": {"size_bytes": 3, "sha256": ["0"]}, "../state.json": {"size_bytes": 0, "sha256": []}},
        {"state.json": {"size_bytes": 3, "sha256": ["0"]}, "manifest.json": {"size_bytes": 0, "sha256": []}},
    ],
)
def test_a_file_list_that_is_none_is_damage(directory: Path, files: object) -> None:
    edit_manifest(directory, files=files)
    with pytest.raises(CheckpointDamagedError, match=r"manifest\.json"):
        read_manifest(directory)


def test_a_manifest_without_libraries_is_read(directory: Path) -> None:
    edit_manifest(directory, libraries=None)
    assert read_manifest(directory).libraries == {}


def test_a_changed_byte_anywhere_in_the_manifest_is_noticed(directory: Path) -> None:
    text = (directory / "manifest.json").read_bytes()
    for index in range(len(text)):
        (directory / "manifest.json").write_bytes(text[:index] + bytes([text[index] ^ 1]) + text[index + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_manifest(directory)


def test_a_manifest_without_its_digest_is_damage(directory: Path) -> None:
    for digest in (None, "", 3, "0" * 63, "é" * 64):
        edit_json(directory / "manifest.json", sha256=digest)
        with pytest.raises(CheckpointDamagedError, match="own SHA-256"):
            read_manifest(directory)


def test_its_place_among_a_run_s_checkpoints_comes_back(directory: Path) -> None:
    place = Place(step=7, serial=2, metrics={"loss": 0.5})
    manifest = make_manifest(read_manifest(directory).files, place)
    (directory / "manifest.json").write_text(manifest_to_json(manifest))
    assert read_manifest(directory).place == place


@pytest.mark.parametrize(
    "place",
    [None, 3, {"step": 1}, {"step": 1.5, "serial": 1, "metrics": {}}, {"step": 1, "serial": 1, "metrics": {"a": "b"}}],
)
def test_a_place_that_is_none_is_damage(directory: Path, place: object) -> None:
    edit_manifest(directory, place=place)
    with pytest.raises(CheckpointDamagedError, match="step, serial"):
        read_manifest(directory)


@pytest.mark.parametrize("position", [0, 7, 8, 15, 16, 20])
def test_an_altered_byte_is_named_with_its_chunk(directory: Path, position: int, monkeypatch) -> None:
    monkeypatch.setattr(digests, "CHUNK_BYTES", 8)
    monkeypatch.setattr(module, "CHUNK_BYTES", 8)
    (directory / "model.safetensors").write_bytes(bytes(range(21)))
    manifest = describe_files(directory, ["state.json", "model.safetensors"])
    check_files(directory, manifest)
    with open(directory / "model.safetensors", "r+b") as file:
        file.seek(position)
        file.write(b"\xff")
    begin = position // 8 * 8
    with pytest.raises(CheckpointDamagedError, match=rf"model\.safetensors that .* {begin} and {min(begin + 8, 21)}\."):
        check_files(directory, manifest)


def test_a_file_that_vanishes_while_it_is_checked_is_damage(directory: Path) -> None:
    manifest = read_manifest(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointDamagedError, match=r"model\.safetensors that can't be read"):
        check_files(directory, manifest)


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
@given(key=st.sampled_from(["format", "version", "chunk_bytes", "files", "libraries", "place"]), value=json_values)
def test_a_manifest_with_anything_in_it_gives_a_typed_error_or_is_read(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / "state.json").write_text("{}\n")
    (directory / "manifest.json").write_text(manifest_to_json(describe_files(directory, ["state.json"])))
    edit_manifest(directory, **{key: value})
    try:
        read_manifest(directory)
    except CheckpointError:
        assert key != "libraries"
    else:
        assert key == "libraries"
