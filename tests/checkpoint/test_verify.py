"""Examining checkpoints: every fault is found and named, in ours and in foreign ones."""

from pathlib import Path

import pytest
import torch

import everygpu
from everygpu.checkpoint.verify import examine, total_bytes
from tests.checkpoint.models import Net
from tests.checkpoint.poison import must_not_run
from tests.checkpoint.test_dcp import write_dcp
from tests.checkpoint.test_foreign import write_sharded

FILES = ["SHA256SUMS", "checkpoint.json", "model.safetensors", "training.safetensors"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = Net(1)
    optimizer = torch.optim.Adam(model.parameters())
    return everygpu.save(tmp_path / "ckpt", model=model, optimizer=optimizer, epoch=3, x=torch.ones(2))


def test_a_good_checkpoint_has_no_fault(path: Path) -> None:
    seen: list[int] = []
    report = examine(path, seen.append)
    assert (report.faults, report.format, report.num_files) == ((), "everygpu; SHA-256", 4)
    assert sum(seen) == total_bytes(path) - (path / "SHA256SUMS").stat().st_size


def test_all_checkpoints_of_a_run_are_examined(tmp_path: Path) -> None:
    with everygpu.CheckpointManager(tmp_path / "run", model=Net(1)) as manager:
        for step in (1, 2, 3):
            manager.save(step)
    assert examine(tmp_path / "run").faults == ()
    assert examine(tmp_path / "run").num_files == 9
    damaged = tmp_path / "run" / "step-00000002" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    (fault,) = examine(tmp_path / "run").faults
    assert "step-00000002/model.safetensors was altered" in fault


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0, 0.5, -1])
def test_a_flipped_bit_is_found_and_the_file_named(path: Path, name: str, place: float) -> None:
    data = bytearray((path / name).read_bytes())
    data[int(place * len(data)) if place == 0.5 else int(place)] ^= 0x10
    (path / name).write_bytes(data)
    assert name in examine(path).faults[0]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"format": "x"}', '{"format": "everygpu", "version": 1}'])
def test_a_file_of_anything_or_missing_is_a_fault(path: Path, name: str, text: str | None) -> None:
    (path / name).unlink()
    if text is not None:
        (path / name).write_text(text)
    assert name in examine(path).faults[0]


def test_foreign_files_without_fault(tmp_path: Path) -> None:
    torch.save({"model": Net(1).state_dict()}, tmp_path / "a.pt")
    write_dcp(tmp_path / "dcp", {"w": torch.ones(2)})
    (tmp_path / "hf").mkdir()
    write_sharded(tmp_path / "hf", "bin")
    for name, num_files in (("a.pt", 1), ("dcp", 2), ("hf", 3)):
        seen: list[int] = []
        report = examine(tmp_path / name, seen.append)
        assert (report.faults, report.num_files) == ((), num_files)
        assert sum(seen) == report.size_bytes > 0


def test_a_flipped_bit_in_a_file_of_torch_save(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1000)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(bytes(4000)) + 2000] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    assert "was altered in a/data/0" in examine(tmp_path / "a.pt").faults[0]


def test_foreign_files_with_faults(tmp_path: Path) -> None:
    with must_not_run(tmp_path) as poison:
        torch.save({"w": poison}, tmp_path / "poison.pt")
        assert "wants to run" in examine(tmp_path / "poison.pt").faults[0]
    (tmp_path / "empty.pt").touch()
    assert "is empty" in examine(tmp_path / "empty.pt").faults[0]
    (tmp_path / "text.pt").write_text("hello")
    assert "no known format" in examine(tmp_path / "text.pt").faults[0]
    (tmp_path / "hf").mkdir()
    index = write_sharded(tmp_path / "hf", "safetensors")
    next(index.parent.glob("*00002-of*")).unlink()
    assert "not in the same directory" in examine(index).faults[0]
