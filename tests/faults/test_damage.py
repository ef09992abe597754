"""A file is cut off, or one bit of it flipped; it is noticed, named, and stepped over."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import everygpu
from everygpu.errors import CheckpointDamagedError, CheckpointError
from tests.faults.inject import files_of, flip_bit, truncate
from tests.faults.savers import Weights

FILES = ["SHA256SUMS", "checkpoint.json", "model.safetensors", "training.safetensors"]


def save_two(directory: Path) -> None:
    """Save steps 1 and 2 of a run, with every kind of file."""
    model = Weights(1, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = everygpu.CheckpointManager(directory, model=model, optimizer=optimizer)
    for step in (1, 2):
        (model.first.sum() + model.second.sum()).backward()
        optimizer.step()
        checkpoints.save(step)
    assert [path.name for path in files_of(directory / "step-00000002")] == FILES


def try_faults(directory: Path, num_faults: int, fault: Callable[[Path, random.Random], None]) -> list[CheckpointError]:
    """Alter each file of step 2 in turn; loading must name it, change nothing, and fall back to step 1."""
    save_two(directory)
    chance, errors = random.Random(0), []
    files = files_of(directory / "step-00000002")
    originals = {path: path.read_bytes() for path in files}
    for index in range(num_faults):
        path = files[index % len(files)]
        fault(path, chance)
        assert path.read_bytes() != originals[path]
        model = Weights(-1, 64)
        with pytest.raises(CheckpointError, match=path.name) as raised:
            everygpu.load(directory / "step-00000002", model=model)
        assert (model.first == -1).all()
        with pytest.warns(UserWarning, match=rf"(?s)step-00000001 is taken.*{path.name}"):
            assert everygpu.CheckpointManager(directory, model=model).resume() == 1
        errors.append(raised.value)
        path.write_bytes(originals[path])
    assert everygpu.CheckpointManager(directory, model=model).resume() == 2
    return errors


def test_a_file_is_cut_off(tmp_path: Path) -> None:
    errors = try_faults(tmp_path, 40, truncate)
    assert all(isinstance(error, CheckpointDamagedError) for error in errors)


def test_one_bit_is_flipped(tmp_path: Path) -> None:
    assert len(try_faults(tmp_path, 60, flip_bit)) == 60
