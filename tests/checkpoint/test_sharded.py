"""Models in several files: found through the index, which is trusted in nothing."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from everygpu.checkpoint.foreign import read_foreign
from everygpu.errors import CheckpointDamagedError, CheckpointForeignError
from tests.checkpoint.models import same_state
from tests.checkpoint.poison import must_not_run

STATE = {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(4, dtype=torch.bfloat16), "b.bias": torch.tensor(3)}


def write_sharded(directory: Path, kind: str) -> Path:
    """As Transformers writes: each shard a file of its own, an index beside them."""
    safe = kind == "safetensors"
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    shards = {
        f"{stem}-00001-of-00002.{suffix}": ["a.weight"],
        f"{stem}-00002-of-00002.{suffix}": ["b.weight", "b.bias"],
    }
    for shard, names in shards.items():
        tensors: dict[str, Tensor] = {name: STATE[name] for name in names}
        save_file(tensors, directory / shard) if safe else torch.save(tensors, directory / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    return write_index(directory / f"{stem}.{suffix}.index.json", weight_map)


def write_index(path: Path, weight_map: Any) -> Path:
    path.write_text(json.dumps({"metadata": {"total_size": 40}, "weight_map": weight_map}, indent=2))
    return path


@pytest.fixture(params=["safetensors", "bin"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_sharded(tmp_path, request.param)


def test_by_index_and_by_directory(index: Path) -> None:
    for path in (index, index.parent):
        assert same_state(dict(read_foreign(path).require_model("")), STATE)


def test_a_directory_with_links_out_of_it_is_read(index: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for entry in [entry for entry in tmp_path.iterdir() if entry.is_file()]:
        os.symlink(f"../{entry.name}", snapshot / entry.name)
    assert same_state(dict(read_foreign(snapshot).require_model("")), STATE)


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/b.bin",
        "..",
        ".",
        "",
        "C:\\x.bin",
        "..\\x.bin",
        "x\0y",
        None,
        3,
        ["x"],
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, shard: Any) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    index = write_index(inside / "model.safetensors.index.json", {"a": shard})
    with pytest.raises(CheckpointDamagedError, match="which is no file name in the same directory"):
        read_foreign(index)


def test_a_poisoned_shard_is_refused_and_not_run(tmp_path: Path) -> None:
    with must_not_run(tmp_path) as poison:
        torch.save({"a": poison}, tmp_path / "s.bin")
        index = write_index(tmp_path / "pytorch_model.bin.index.json", {"a": "s.bin"})
        with pytest.raises(CheckpointForeignError, match=r"s\.bin wants to run"):
            read_foreign(index)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def add_a_name(path: Path) -> None:
    weight_map = json.loads(path.read_text())["weight_map"]
    write_index(path, weight_map | {"c": weight_map["a.weight"]})


@pytest.mark.parametrize(
    ("change", "file", "error", "match"),
    [
        (
            Path.unlink,
            "*00002-of*",
            CheckpointDamagedError,
            r"lists 1 shards that are not in the same directory, such as \w+-00002-of",
        ),
        (cut_off, "*00002-of*", CheckpointDamagedError, "00002-of"),
        (cut_off, "*.index.json", CheckpointDamagedError, r"index\.json"),
        (add_a_name, "*.index.json", CheckpointDamagedError, "00001-of.* lacks 'c'"),
        (lambda path: write_index(path, {"a": path.name}), "*.json", CheckpointDamagedError, "is an index itself"),
        (lambda path: path.write_text('{"weight_map": []}'), "*.json", CheckpointForeignError, "weight_map"),
        (lambda path: path.write_text("{}"), "*.json", CheckpointForeignError, "weight_map"),
    ],
)
def test_what_is_wrong_is_named(index: Path, change: Any, file: str, error: Any, match: str) -> None:
    change(next(index.parent.glob(file)))
    with pytest.raises(error, match=match):
        read_foreign(index)
