"""Umask, the group's directories and symbolic links are respected."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import everygpu
from tests.faults.savers import EVERYGPU, Weights, version_of


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(directory: Path) -> set[int]:
    return {stat.S_IMODE(entry.stat().st_mode) for entry in directory.iterdir()}


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o027, 0o077], ids=oct)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_umask_decides_who_may_read(tmp_path: Path, mask: int, asynchronous: bool) -> None:
    model = Weights(1)
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "shuffle": torch.Generator()}
    with umask(mask), everygpu.CheckpointManager(tmp_path / "run", asynchronous=asynchronous, **parts) as checkpoints:
        for step in (1, 2):
            path = checkpoints.save(step)
    assert path is not None
    assert modes(path) == {0o666 & ~mask}
    assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~mask
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o777 & ~mask


@pytest.mark.skipif(os.name == "nt", reason="no groups")
def test_a_directory_of_the_group_s_gives_its_group_on(tmp_path: Path) -> None:
    group = next((g for g in [*os.getgroups(), 12345] if g != os.getegid()), None)
    try:
        os.chown(tmp_path, -1, group)
    except (PermissionError, TypeError):
        pytest.skip("needs a second group")
    tmp_path.chmod(0o2775)
    with umask(0o002):
        path = EVERYGPU.save(tmp_path / "ckpt", Weights(1))
        EVERYGPU.save(tmp_path / "ckpt", Weights(2))
    assert isinstance(path, Path)
    assert {entry.stat().st_gid for entry in [path, *path.iterdir()]} == {group}
    assert modes(path) == {0o664}
    assert stat.S_IMODE(path.stat().st_mode) == 0o2775


def test_the_permissions_a_checkpoint_was_given_stay(tmp_path: Path) -> None:
    path = EVERYGPU.save(tmp_path / "ckpt", Weights(1))
    assert isinstance(path, Path)
    path.chmod(0o750)
    EVERYGPU.save(path, Weights(2))
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


def test_a_linked_checkpoint_is_written_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "ckpt").symlink_to("disk/real")
    for version in (1, 2):
        EVERYGPU.save(tmp_path / "ckpt", Weights(version))
        assert version_of(EVERYGPU.load(tmp_path / "disk" / "real")) == version
        assert version_of(EVERYGPU.load(tmp_path / "ckpt")) == version
    assert (tmp_path / "ckpt").is_symlink()
    assert os.listdir(tmp_path / "disk") == ["real"]


def test_a_run_s_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    model = Weights(2)
    checkpoints = everygpu.CheckpointManager(tmp_path / "run", keep=1, model=model)
    for step in (1, 2):
        checkpoints.save(step)
    assert (tmp_path / "run").is_symlink()
    assert os.listdir(tmp_path / "disk") == ["step-00000002"]
    assert version_of(EVERYGPU.load(tmp_path / "run")) == 2
