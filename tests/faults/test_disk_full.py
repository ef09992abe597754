"""The disk is full; a typed error, the old checkpoint untouched, nothing temporary left."""

import errno
import os
from pathlib import Path

import pytest
import torch

import everygpu
from everygpu.checkpoint.convert import convert
from everygpu.errors import CheckpointError
from tests.faults.inject import file_size_limit, files_of, full_at, is_disk_error
from tests.faults.savers import EVERYGPU, Weights, version_of


def assert_old_is_there(root: Path) -> None:
    assert os.listdir(root) == ["ckpt"]
    assert version_of(EVERYGPU.load(root / "ckpt")) == 1


def test_a_write_fails_after_any_number_of_bytes(tmp_path: Path) -> None:
    EVERYGPU.save(tmp_path / "ckpt", Weights(1))
    biggest = max(path.stat().st_size for path in files_of(tmp_path / "ckpt"))
    limits = [*range(0, 2000, 40), *range(2000, biggest, 700), biggest - 1]
    for limit in limits:
        error = full_at(EVERYGPU, tmp_path, limit, Weights(2))
        assert isinstance(error, CheckpointError), f"at {limit} bytes: {error!r}"
        assert is_disk_error(error)
        assert_old_is_there(tmp_path)
    assert full_at(EVERYGPU, tmp_path, biggest, Weights(2)) is None
    assert len(limits) >= 100


def test_any_call_to_the_system_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EVERYGPU.save(tmp_path / "ckpt", Weights(1))
    for name in ("mkdir", "fsync", "rename", "replace"):
        real, failures, errors = getattr(os, name), 0, 0
        while True:
            calls = 0

            def failing(*args: object, name: str = name, fail_at: int = failures + 1, **kwargs: object) -> object:
                nonlocal calls
                calls += 1
                if calls == fail_at:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real(*args, **kwargs)  # noqa: B023

            with monkeypatch.context() as patch:
                patch.setattr(os, name, failing)
                try:
                    EVERYGPU.save(tmp_path / "ckpt", Weights(2))
                    if calls == failures:
                        break
                    EVERYGPU.save(tmp_path / "ckpt", Weights(1))  # filelock continues without its folder
                except CheckpointError as error:
                    assert is_disk_error(error)  # noqa: PT017
                    errors += 1
            failures += 1
            assert_old_is_there(tmp_path)
        assert errors >= 1
        EVERYGPU.save(tmp_path / "ckpt", Weights(1))


@pytest.mark.parametrize("name", ["b.pt", "b.safetensors"])
def test_a_conversion_says_that_the_disk_is_full(tmp_path: Path, name: str) -> None:
    torch.save(Weights(1).state_dict(), tmp_path / "a.pt")
    num_bytes = (tmp_path / "a.pt").stat().st_size
    for limit in (0, 1000, num_bytes // 2, num_bytes - 2000):
        with (
            file_size_limit(limit),
            pytest.raises(CheckpointError, match="can't be written: .*File too large") as caught,
        ):
            convert(tmp_path / "a.pt", tmp_path / name)
        assert is_disk_error(caught.value)
        assert os.listdir(tmp_path) == ["a.pt"]
    convert(tmp_path / "a.pt", tmp_path / name)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager_keeps_what_it_has(tmp_path: Path, asynchronous: bool) -> None:
    model = Weights(1)
    checkpoints = everygpu.CheckpointManager(tmp_path, keep=1, asynchronous=asynchronous, model=model)
    checkpoints.save(1)
    checkpoints.wait()
    model.load_state_dict(Weights(2).state_dict())

    def save() -> None:
        checkpoints.save(2)
        checkpoints.wait()

    with file_size_limit(10_000), pytest.raises(CheckpointError, match="File too large"):
        save()
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert version_of(EVERYGPU.load(tmp_path)) == 1
    checkpoints.close()
