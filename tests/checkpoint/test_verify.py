"""Examining checkpoints: every fault is found and named, in ours and in foreign ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from everygpu.checkpoint.manifest import manifest_to_json

import everygpu
from everygpu.checkpoint.verify import Report, examine, total_bytes
from everygpu.errors import CheckpointNotFoundError
from tests.checkpoint.forge import describe_files
from tests.checkpoint.models import Net
from tests.checkpoint.poison import must_not_run
from tests.checkpoint.test_dcp import write_dcp
from tests.checkpoint.test_sharded import write_sharded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = Net(1)
    optimizer = torch.optim.Adam(model.parameters())
    return everygpu.save(tmp_path / "ckpt", model=model, optimizer=optimizer, epoch=3, x=torch.ones(2))


def describe_again(path: Path) -> None:
    """Write a manifest for the files as they are now."""
    (path / "manifest.json").write_text(manifest_to_json(describe_files(path, FILES)))


def files_at_fault(report: Report) -> list[str]:
    return sorted(fault.file for fault in report.faults)


FILES = ["model.safetensors", "optimizer.safetensors", "state.safetensors", "state.json"]


def test_a_good_checkpoint_has_no_fault(path: Path) -> None:
    seen: list[int] = []
    report = examine(path, seen.append)
    assert report.faults == ()
    assert report.means == "sizes and SHA-256"
    assert report.num_files == 4
    assert sum(seen) == report.size_bytes == total_bytes(path) - (path / "manifest.json").stat().st_size


def test_an_altered_manifest_is_the_fault_not_the_files(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"]["sha256"] = ["0" * 64]
    (path / "manifest.json").write_text(json.dumps(manifest))
    (fault,) = examine(path).faults
    assert fault.file == "manifest.json"
    assert "was altered" in fault.problem


def test_all_checkpoints_of_a_run_are_examined(tmp_path: Path) -> None:
    with everygpu.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2, 3):
            manager.save(step, model=Net(step))
    assert examine(tmp_path / "run").faults == ()
    assert examine(tmp_path / "run").num_files == 6
    damaged = tmp_path / "run" / "step-00000002" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert files_at_fault(examine(tmp_path / "run")) == ["step-00000002/model.safetensors"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0, 0.5, -1])
def test_a_flipped_bit_is_found_and_the_file_named(path: Path, name: str, place: float) -> None:
    data = bytearray((path / name).read_bytes())
    data[int(place * len(data)) if place == 0.5 else int(place)] ^= 0x10
    (path / name).write_bytes(data)
    assert files_at_fault(examine(path)) == [name]


def test_all_faults_are_listed_not_just_the_first(path: Path) -> None:
    (path / FILES[0]).unlink()
    (path / FILES[1]).write_bytes(b"short")
    assert files_at_fault(examine(path)) == FILES[:2]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "x"}', '{"format": "everygpu.checkpoint", "version": 1}'])
def test_a_broken_manifest_is_a_fault(path: Path, text: str) -> None:
    (path / "manifest.json").write_text(text)
    assert files_at_fault(examine(path)) == ["manifest.json"]


@pytest.mark.parametrize(
    "changes", [{"model": {}}, {"extras": []}, {"rng": {"$tensor": "x"}}, {"optimizer": 3}], ids=str
)
def test_a_state_of_another_structure_is_a_fault(path: Path, changes: dict[str, Any]) -> None:
    state = path / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | changes))
    describe_again(path)
    report = examine(path)
    assert len(report.faults) == 1
    assert "state.json" in report.faults[0].problem


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        examine(tmp_path / "none")


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
    assert "was altered in a/data/0" in examine(tmp_path / "a.pt").faults[0].problem


def test_foreign_files_with_faults(tmp_path: Path) -> None:
    with must_not_run(tmp_path) as poison:
        torch.save({"w": poison}, tmp_path / "poison.pt")
        assert "wants to run" in examine(tmp_path / "poison.pt").faults[0].problem
    (tmp_path / "empty.pt").touch()
    assert "is empty" in examine(tmp_path / "empty.pt").faults[0].problem
    (tmp_path / "text.pt").write_text("hello")
    assert "no format" in examine(tmp_path / "text.pt").faults[0].problem
    (tmp_path / "hf").mkdir()
    index = write_sharded(tmp_path / "hf", "safetensors")
    next(index.parent.glob("*00002-of*")).unlink()
    assert "not beside it" in examine(index).faults[0].problem
