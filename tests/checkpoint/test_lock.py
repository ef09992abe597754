"""The lock: one holder at a time, among threads and processes, and nothing left behind."""

import errno
import os
from pathlib import Path

import pytest

from everygpu.checkpoint import lock as module
from everygpu.checkpoint.lock import hold_lock
from everygpu.errors import CheckpointBusyError


def test_the_second_holder_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with hold_lock(path) as is_alone:
        assert is_alone
        for _ in range(2):
            with pytest.raises(CheckpointBusyError, match="locked by another saver"), hold_lock(path):
                pass
    with hold_lock(path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_it_is_released_when_the_block_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), hold_lock(tmp_path / ".lock"):
        raise ZeroDivisionError
    with hold_lock(tmp_path / ".lock") as is_alone:
        assert is_alone


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_dead_holder_s_lock_is_free_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with hold_lock(path):
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os._exit(9)
    os.read(ready[0], 1)
    with pytest.raises(CheckpointBusyError), hold_lock(path):
        pass
    os.write(go[1], b"x")
    os.waitpid(child, 0)
    for descriptor in (*ready, *go):
        os.close(descriptor)
    assert path.exists(), "the test wants a lock file that a dead process left"
    with hold_lock(path) as is_alone:
        assert is_alone


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_meanwhile_does_not_keep_it(tmp_path: Path) -> None:
    """A DataLoader's worker, started while a checkpoint is saved, has the lock's file open too."""
    go = os.pipe()
    with hold_lock(tmp_path / ".lock"):
        child = os.fork()
        if child == 0:
            os.read(go[0], 1)
            os._exit(0)
    try:
        with hold_lock(tmp_path / ".lock") as is_alone:
            assert is_alone
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for descriptor in go:
            os.close(descriptor)


def test_a_file_removed_between_opening_and_locking_is_opened_again(tmp_path: Path, monkeypatch) -> None:
    path, real, removed = tmp_path / ".lock", module._lock, []

    def lock_late(descriptor: int) -> None:
        if not removed:
            removed.append(path.unlink())
        real(descriptor)

    monkeypatch.setattr(module, "_lock", lock_late)
    with hold_lock(path):
        assert path.exists()
        with pytest.raises(CheckpointBusyError), hold_lock(path):
            pass


def test_a_file_system_without_locks_is_logged(tmp_path: Path, monkeypatch, caplog) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module, "_lock", refuse)
    with hold_lock(tmp_path / ".lock") as is_alone:
        assert not is_alone
    assert "can't be locked" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_can_t_be_written_is_the_system_s_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), hold_lock(tmp_path / "none" / ".lock"):
        pass
