"""A lock between processes, which the system releases when its holder dies."""

import errno
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from everygpu.errors import CheckpointBusyError, CheckpointError
from everygpu.locks import give, take

logger = logging.getLogger("everygpu")
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
"""What file systems answer that know no locks, as some network mounts."""


@contextmanager
def hold_lock(path: Path) -> Iterator[bool]:
    """Keep every other holder of the lock away until the block ends, in this process and in others.

    Args:
        path: The lock file; made for the purpose and removed again.
    Returns:
        Whether the lock is exclusive; False where the file system has no locks, which is logged.
    Raises:
        CheckpointBusyError: another saver holds it.
        OSError: the file can't be made.
    """
    owner = os.getpid()
    descriptor = _open_locked(path)
    if descriptor is None:
        logger.warning("%s can't be locked on this file system: let only one process save there.", path)
        yield False
        return
    try:
        yield True
    finally:
        if owner == os.getpid():  # a process forked in the block has nothing to let go
            # Removed while it is held: a process that opened it meanwhile finds it gone and opens a new one.
            with suppress(OSError):
                path.unlink()
            give(descriptor)
            _lock_files().close(descriptor)


class _LockFiles:
    """The lock files that this process has open.

    A forked process has them open too, and would hold the lock as long as it lives: a DataLoader's workers, for
    instance, which outlive a run that is killed. So it closes them at once.
    """

    def __init__(self) -> None:
        self._descriptors: set[int] = set()
        # Held while a file is opened and noted, and by each fork: it would miss a file that is not noted yet.
        self._noting = threading.Lock()
        if sys.platform != "win32":
            os.register_at_fork(
                before=self._noting.acquire, after_in_parent=self._noting.release, after_in_child=self._close_all
            )

    def open(self, path: Path) -> int:
        with self._noting:
            descriptor = _open(path)
            self._descriptors.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        with self._noting:
            self._descriptors.remove(descriptor)
            os.close(descriptor)

    def _close_all(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._noting.release()


@cache
def _lock_files() -> _LockFiles:
    """Return those of this process: what is called at a fork can't be taken back, so it is registered once."""
    return _LockFiles()


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError as cause:
        # Left by a saver of another user that was killed. To lock it, reading is enough.
        try:
            return os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise cause from None
        except PermissionError:
            raise CheckpointError(
                f"save: the lock file must be readable, got {path} of another user, or without permissions. Where "
                f"nothing is saving there, a saver that was killed has left it: remove it."
            ) from cause
    if sys.platform != "win32":
        with suppress(OSError):  # whatever umask says: should it be left behind, others must be able to lock it
            os.fchmod(descriptor, 0o666)
    return descriptor


def _open_locked(path: Path) -> int | None:
    files = _lock_files()
    while True:
        descriptor = files.open(path)
        try:
            if not take(descriptor):
                raise _busy(path)
            if _is_same_file(descriptor, path):
                return descriptor
        except BaseException as cause:
            files.close(descriptor)
            if isinstance(cause, PermissionError):
                raise _busy(path) from cause
            if not isinstance(cause, OSError) or cause.errno not in _UNSUPPORTED:
                raise
            with suppress(OSError):
                path.unlink()
            return None
        files.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Tell whether the path still names the locked file, and not one made after it was removed."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _busy(path: Path) -> CheckpointBusyError:
    return CheckpointBusyError(
        f"save: the path must have one saver at a time, got {path} locked by another saver. "
        f"Wait for it, or save each run to a directory of its own."
    )
