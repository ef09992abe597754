"""Checkpoints of other programs: told by their content, read without running anything, refused with the reason."""

import argparse
import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import everygpu
from everygpu.checkpoint.foreign import find_archive_fault, format_of, read_foreign, read_torch
from everygpu.errors import CheckpointDamagedError, CheckpointForeignError
from tests.checkpoint.models import Net, same_state
from tests.checkpoint.poison import must_not_run

STATE = {"w": torch.ones(2, 3)}


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.ckpt", "a.bin", "a.safetensors", "a"])
@pytest.mark.parametrize("kind", ["torch", "legacy", "safetensors"])
def test_the_name_of_a_file_does_not_matter(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    if kind == "safetensors":
        save_file(STATE, path)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=kind == "torch")
    assert format_of(path) == ("safetensors" if kind == "safetensors" else "torch.save")
    assert same_state(dict(read_foreign(path).require_model("")), STATE)


@pytest.mark.parametrize("header_bytes", [128, 384, 640, 896, 1152, 1408, 2**16 + 128])
def test_safetensors_whose_length_begins_as_a_pickle(tmp_path: Path, header_bytes: int) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode().ljust(header_bytes)
    (tmp_path / "a").write_bytes(struct.pack("<Q", header_bytes) + header + struct.pack("<6f", *[1.0] * 6))
    assert format_of(tmp_path / "a") == "safetensors"
    assert same_state(dict(read_foreign(tmp_path / "a").require_model("")), STATE)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "diffusion_pytorch_model.safetensors"])
def test_a_directory_with_a_model_under_a_usual_name(tmp_path: Path, name: str) -> None:
    save_file(STATE, tmp_path / name) if name.endswith("safetensors") else torch.save(STATE, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    if name == "model.safetensors":
        (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    assert same_state(dict(read_foreign(tmp_path).require_model("")), STATE)


def test_our_own_directories_are_not_foreign_even_when_damaged(tmp_path: Path) -> None:
    path = everygpu.save(tmp_path / "ckpt", model=torch.nn.Linear(1, 1))
    for name in ("checkpoint.json", "SHA256SUMS"):
        data = (path / name).read_bytes()
        (path / name).unlink()
        with pytest.raises(CheckpointDamagedError, match=name):
            everygpu.load(path, model=torch.nn.Linear(1, 1))
        (path / name).write_bytes(data)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS.*git lfs pull"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x93NUMPY\x01\x00", r"numpy\.load"),
        (b"<!DOCTYPE html>", "web page"),
        (b"hello", "no known format"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path: Path, data: bytes, named: str) -> None:
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CheckpointForeignError, match=named):
        read_foreign(tmp_path / "a.pt")


def test_a_directory_of_something_else_lists_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "epoch1").mkdir()
    (tmp_path / "best.pt").touch()
    with pytest.raises(CheckpointForeignError, match=r"directories: best\.pt, epoch1\."):
        read_foreign(tmp_path)


# Files of torch.save.


def write(path: Path, value: Any, *, new_format: bool = True) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=new_format)
    return path


def test_a_compressed_archive_is_read_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.pt", {"w": torch.arange(1000.0)})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    assert torch.equal(read_torch(tmp_path / "b.pt")["w"], torch.arange(1000.0))


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])
def test_tensors_of_a_gpu_come_to_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_format: bool) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
    path = write(tmp_path / "a.pt", {"w": torch.ones(3)}, new_format=new_format)
    assert b"cuda:3" in path.read_bytes()
    assert read_torch(path)["w"].device.type == "cpu"


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("forced", [False, True], ids=["", "unsafe loading asked for"])
def test_a_poisoned_file_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_format: bool, forced: bool
) -> None:
    with monkeypatch.context() as patch, must_not_run(tmp_path) as poison:
        if forced:
            patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        path = write(tmp_path / "a.pt", {"w": torch.ones(2), "x": poison}, new_format=new_format)
        with pytest.raises(CheckpointForeignError, match=r"a\.pt wants to run \w*\.?open\. Nothing in it was executed"):
            read_torch(path)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear"),
        ({"args": argparse.Namespace(lr=1)}, r"argparse\.Namespace"),
        ({"acc": __import__("numpy").float64(0.5)}, r"numpy.*scalar"),
    ],
    ids=["module", "namespace", "numpy"],
)
def test_what_needs_more_is_refused_by_name(tmp_path: Path, value: Any, named: str) -> None:
    with pytest.raises(CheckpointForeignError, match=f"wants to run {named}.*add_safe_globals"):
        read_torch(write(tmp_path / "a.pt", value))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_refused(tmp_path: Path) -> None:
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)).save(tmp_path / "a.pt")
    with pytest.raises(CheckpointForeignError, match="is a TorchScript archive, which holds code"):
        read_torch(tmp_path / "a.pt")


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("keep", [5, 100, 0.5, 0.9, -1])
def test_a_truncated_file_is_damaged(tmp_path: Path, new_format: bool, keep: float) -> None:
    path = write(tmp_path / "a.pt", Net().state_dict(), new_format=new_format)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointDamagedError, match=r"a\.pt"):
        read_torch(path)


def test_files_without_checksums_have_no_fault(tmp_path: Path) -> None:
    legacy = write(tmp_path / "a.pt", {"w": torch.zeros(3)}, new_format=False)
    assert find_archive_fault(legacy) is None
    torch.serialization.set_crc32_options(False)
    try:
        write(tmp_path / "b.pt", {"w": torch.zeros(3)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert find_archive_fault(tmp_path / "b.pt") is None


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_a_pickle_of_a_later_protocol_is_named_as_such(tmp_path: Path, protocol: int, zipped: bool) -> None:
    state = {"a": torch.ones(2)}
    torch.save(state, tmp_path / "a.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointForeignError, match="of protocol 4 or later.*save it again"):
        read_torch(tmp_path / "a.pt")
    torch.save(torch.load(tmp_path / "a.pt", weights_only=False), tmp_path / "b.pt")
    assert read_torch(tmp_path / "b.pt")["a"].equal(state["a"])


# Shards with an index, which is trusted in nothing.


SHARDED = {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(4, dtype=torch.bfloat16), "b.bias": torch.tensor(3)}


def write_sharded(directory: Path, kind: str) -> Path:
    """As Transformers writes: each shard a file of its own, an index beside them."""
    safe = kind == "safetensors"
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    shards = {
        f"{stem}-00001-of-00002.{suffix}": ["a.weight"],
        f"{stem}-00002-of-00002.{suffix}": ["b.weight", "b.bias"],
    }
    for shard, names in shards.items():
        tensors: dict[str, Tensor] = {name: SHARDED[name] for name in names}
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
        assert same_state(dict(read_foreign(path).require_model("")), SHARDED)


def test_a_directory_with_links_out_of_it_is_read(index: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for entry in [entry for entry in tmp_path.iterdir() if entry.is_file()]:
        os.symlink(f"../{entry.name}", snapshot / entry.name)
    assert same_state(dict(read_foreign(snapshot).require_model("")), SHARDED)


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
