"""The lock: one holder at a time, among threads and processes, and nothing left behind."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from everygpu.checkpoint import lock as module
from everygpu.checkpoint.lock import hold_lock
from everygpu.errors import CheckpointBusyError, CheckpointError


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
    path, real, removed = tmp_path / ".lock", module.take, []

    def lock_late(descriptor: int) -> bool:
        if not removed:
            removed.append(path.unlink())
        return real(descriptor)

    monkeypatch.setattr(module, "take", lock_late)
    with hold_lock(path):
        assert path.exists()
        with pytest.raises(CheckpointBusyError), hold_lock(path):
            pass


def test_a_file_system_without_locks_is_logged(tmp_path: Path, monkeypatch, caplog) -> None:
    def refuse(descriptor: int) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module, "take", refuse)
    with hold_lock(tmp_path / ".lock") as is_alone:
        assert not is_alone
    assert "can't be locked" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_can_t_be_written_is_the_system_s_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), hold_lock(tmp_path / "none" / ".lock"):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_dead_holder_s_forks_do_not_keep_it(tmp_path: Path) -> None:
    """A DataLoader's slow workers outlive a run that is killed while it saves."""
    go = os.pipe()
    child = os.fork()
    if child == 0:
        with hold_lock(tmp_path / ".lock"):
            if os.fork() == 0:
                os.read(go[0], 1)
                os._exit(0)
            os._exit(9)  # as by a kill: nothing is let go
    os.waitpid(child, 0)
    try:
        with hold_lock(tmp_path / ".lock") as is_alone:
            assert is_alone
            with pytest.raises(CheckpointBusyError), hold_lock(tmp_path / ".lock"):
                pass
    finally:
        os.write(go[1], b"x")
        for descriptor in go:
            os.close(descriptor)


def as_another_user(work: Callable[[], object]) -> int:
    """Do work in a process without root's rights; return its status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_another_user_s_file_that_can_only_be_read_is_locked(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # the other user may not pass the directories above
    tmp_path.chmod(0o777)
    Path(".lock").touch()
    Path(".lock").chmod(0o444)

    def lock() -> None:
        with hold_lock(Path(".lock")) as is_alone:
            assert is_alone
            with pytest.raises(CheckpointBusyError), hold_lock(Path(".lock")):
                pass

    assert as_another_user(lock) == 0
    assert not Path(".lock").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_file_that_can_t_even_be_read_is_named_with_what_to_do(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o777)
    Path(".lock").touch()
    Path(".lock").chmod(0)

    def lock() -> None:
        with pytest.raises(CheckpointError, match="remove it"), hold_lock(Path(".lock")):
            pass

    assert as_another_user(lock) == 0


@pytest.mark.skipif(os.name == "nt", reason="no umask")
def test_whatever_umask_says_others_can_lock_what_is_left(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        with hold_lock(tmp_path / ".lock"):
            assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)
