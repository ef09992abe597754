"""What is at a path is told by its content, and what can't be read is named."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import everygpu
from everygpu.checkpoint.foreign import format_of, read_foreign
from everygpu.errors import CheckpointDamagedError, CheckpointForeignError
from tests.checkpoint.models import same_state

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
