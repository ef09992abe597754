"""What is at a path is told by its content, and what can't be read is named."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from everygpu.checkpoint.foreign.formats import is_native, locate
from safetensors.torch import save_file

from everygpu.checkpoint.foreign import is_foreign, read_foreign
from everygpu.errors import CheckpointDamagedError, CheckpointForeignError, CheckpointNotFoundError
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
    assert locate(path).format == ("safetensors" if kind == "safetensors" else "torch")
    assert is_foreign(path)
    assert same_state(dict(read_foreign(path).model or {}), STATE)


@pytest.mark.parametrize("header_bytes", [128, 384, 640, 896, 1152, 1408, 2**16 + 128])
def test_safetensors_whose_length_begins_as_a_pickle(tmp_path: Path, header_bytes: int) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode().ljust(header_bytes)
    (tmp_path / "a").write_bytes(struct.pack("<Q", header_bytes) + header + struct.pack("<6f", *[1.0] * 6))
    assert locate(tmp_path / "a").format == "safetensors"
    assert same_state(dict(read_foreign(tmp_path / "a").model or {}), STATE)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "diffusion_pytorch_model.safetensors"])
def test_a_directory_with_a_model_under_a_usual_name(tmp_path: Path, name: str) -> None:
    save_file(STATE, tmp_path / name) if name.endswith("safetensors") else torch.save(STATE, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    assert is_foreign(tmp_path)
    assert same_state(dict(read_foreign(tmp_path).model or {}), STATE)


def test_safetensors_come_before_pickles(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    assert locate(tmp_path).path.name == "model.safetensors"


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_our_own_directories_are_not_foreign_even_when_damaged(tmp_path: Path, name: str) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    (tmp_path / name).write_text("{}")
    assert is_native(tmp_path)
    assert not is_foreign(tmp_path)


def test_accelerate_keeps_the_optimizer_beside_the_model(tmp_path: Path) -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict()
    save_file(STATE, tmp_path / "model.safetensors")
    torch.save(optimizer, tmp_path / "optimizer.bin")
    torch.save({"last_epoch": 3}, tmp_path / "scheduler.bin")
    (tmp_path / "random_states_0.pkl").write_bytes(b"never read")
    found = read_foreign(tmp_path)
    assert found.optimizer == optimizer
    assert found.scheduler == {"last_epoch": 3}


def test_an_optimizer_that_can_t_be_read_does_not_hide_the_model(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    (tmp_path / "optimizer.bin").write_bytes(b"")
    found = read_foreign(tmp_path)
    assert found.model is not None
    assert found.optimizer is None
    assert found.notes[0].startswith("optimizer.bin is left out")


def test_nothing_there(tmp_path: Path) -> None:
    assert not is_foreign(tmp_path / "none")
    with pytest.raises(CheckpointNotFoundError, match="none with nothing there"):
        read_foreign(tmp_path / "none")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.pt").touch()
    with pytest.raises(CheckpointDamagedError, match=r"a\.pt that is empty"):
        read_foreign(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS.*git lfs pull"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x93NUMPY\x01\x00", r"numpy\.load"),
        (b"<!DOCTYPE html>", "web page"),
        (b"hello", "no format that is known"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path: Path, data: bytes, named: str) -> None:
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CheckpointForeignError, match=named):
        read_foreign(tmp_path / "a.pt")


def test_a_directory_of_something_else_lists_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "epoch1").mkdir()
    (tmp_path / "best.pt").touch()
    assert not is_foreign(tmp_path)
    with pytest.raises(CheckpointForeignError, match=r"directories: best\.pt, epoch1\."):
        read_foreign(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert not is_foreign(tmp_path / "pipe")
    with pytest.raises(CheckpointForeignError, match="neither a file nor a directory"):
        read_foreign(tmp_path / "pipe")


def test_a_file_that_holds_itself_is_damaged(tmp_path: Path) -> None:
    loop: dict[str, object] = {"w": torch.ones(1)}
    loop["x"] = [loop]
    torch.save({"model": {"a": loop}}, tmp_path / "a.pt")
    with pytest.raises(CheckpointDamagedError, match="holds itself"):
        read_foreign(tmp_path / "a.pt")


def test_a_short_file_that_unfolds_to_billions_is_damaged(tmp_path: Path) -> None:
    many: list[object] = [1] * 10
    for _ in range(10):
        many = [many] * 10
    torch.save({"model": STATE, "x": many}, tmp_path / "a.pt")
    with pytest.raises(CheckpointDamagedError, match="unfolds to more than"):
        read_foreign(tmp_path / "a.pt")
