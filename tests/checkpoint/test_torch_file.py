"""Files of torch.save: read without running anything, refused with the reason when they need more."""

import argparse
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everygpu.checkpoint.foreign import find_archive_fault
from everygpu.checkpoint.foreign import read_torch as read_torch_file
from everygpu.errors import CheckpointDamagedError, CheckpointForeignError
from tests.checkpoint.models import Net
from tests.checkpoint.poison import must_not_run


def write(path: Path, value: Any, *, new_format: bool = True) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=new_format)
    return path


def test_a_compressed_archive_is_read_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.pt", {"w": torch.arange(1000.0)})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    assert torch.equal(read_torch_file(tmp_path / "b.pt")["w"], torch.arange(1000.0))


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])
def test_tensors_of_a_gpu_come_to_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_format: bool) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
    path = write(tmp_path / "a.pt", {"w": torch.ones(3)}, new_format=new_format)
    assert b"cuda:3" in path.read_bytes()
    assert read_torch_file(path)["w"].device.type == "cpu"


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
            read_torch_file(path)


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
        read_torch_file(write(tmp_path / "a.pt", value))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_refused(tmp_path: Path) -> None:
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)).save(tmp_path / "a.pt")
    with pytest.raises(CheckpointForeignError, match="is a TorchScript archive, which holds code"):
        read_torch_file(tmp_path / "a.pt")


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("keep", [5, 100, 0.5, 0.9, -1])
def test_a_truncated_file_is_damaged(tmp_path: Path, new_format: bool, keep: float) -> None:
    path = write(tmp_path / "a.pt", Net().state_dict(), new_format=new_format)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointDamagedError, match=r"a\.pt"):
        read_torch_file(path)


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
        read_torch_file(tmp_path / "a.pt")
    torch.save(torch.load(tmp_path / "a.pt", weights_only=False), tmp_path / "b.pt")
    assert read_torch_file(tmp_path / "b.pt")["a"].equal(state["a"])
