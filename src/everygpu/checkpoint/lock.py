"""A lock between processes, which the system releases when its holder dies."""

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from everygpu.errors import CheckpointBusyError

_LOG = logging.getLogger("everygpu")
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
"""What file systems answer that know no locks, as some network mounts."""


@contextmanager
def hold_lock(path: Path) -> Iterator[bool]:
    """Keep every other holder of the lock away until the block ends, in this process and in others.

    Args:
        path: The lock file; made for the purpose and removed again.
    Returns:
        Whether nobody else can hold it; False where the file system has no locks, which is logged.
    Raises:
        CheckpointBusyError: somebody else holds it.
        OSError: the file can't be made.
    """
    descriptor = _open_locked(path)
    if descriptor is None:
        _LOG.warning("%s can't be locked on this file system: let only one process save there.", path)
        yield False
        return
    try:
        yield True
    finally:
        # Removed while it is held: whoever opened it meanwhile finds it gone and opens a new one.
        with suppress(OSError):
            path.unlink()
        # Not left to close: processes forked meanwhile, as a DataLoader's workers, have the file open too.
        _unlock(descriptor)
        os.close(descriptor)


def _open_locked(path: Path) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor)
            if _is_same_file(descriptor, path):
                return descriptor
        except OSError as cause:
            os.close(descriptor)
            if cause.errno in _UNSUPPORTED:
                path.unlink(missing_ok=True)
                return None
            if isinstance(cause, BlockingIOError | PermissionError):
                raise _busy(path) from cause
            raise
        os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Tell whether the path still names the locked file, and not one made after it was removed."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _busy(path: Path) -> CheckpointBusyError:
    return CheckpointBusyError(
        f"save: nobody else may be saving to the same place, got {path} locked by another saver. "
        f"Wait for it, or save each run to a directory of its own."
    )


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    def _unlock(descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
