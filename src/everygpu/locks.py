"""A lock that a process holds as long as it lives; the operating system releases it."""

import os
import sys
import time
from pathlib import Path
from types import TracebackType

from everygpu.folders import open_own

_POLL_S = 0.02
# On Windows a locked region can't be read by others, so it lies far behind the text.
_REGION = 1 << 30


class Lock:
    """An open, locked file: free again at ``release``, or when the operating system ends the process.

    So there are no stale locks: a file that is left over is not locked. Processes forked while it is held keep
    it, for they go on with what it guards; started programs do not.
    """

    __slots__ = ("_handle", "_owner", "path")

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle: int | None = handle
        self._owner = os.getpid()

    def write(self, text: str) -> None:
        """Describe the holder, for processes that find the lock taken."""
        if self._handle is not None:
            os.ftruncate(self._handle, 0)
            os.lseek(self._handle, 0, os.SEEK_SET)
            os.write(self._handle, text.encode())

    def release(self) -> None:
        """Let others take it; a second time does nothing. The file stays: removing it would be a race."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        if self._owner == os.getpid():  # a forked process that lets go must not unlock it for its parent
            give(handle)
        os.close(handle)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def try_lock(path: Path) -> Lock | None:
    """Take a lock if it is free.

    Args:
        path: The lock's file; made if it isn't there, in a folder that is.
    Returns:
        The lock, held; None while another process, or this one, holds it.
    Raises:
        OSError: the file can't be opened, is no regular file of this user, or its file system has no locks.
    Source:
        ``flock(2)``; ``LockFileEx`` on Windows. Both end with the process, also when it is killed.
    """
    return _lock(path, open_own(path, os.O_RDWR | os.O_CREAT))


def _lock(path: Path, handle: int) -> Lock | None:
    try:
        is_taken = not take(handle)
    except BaseException:
        os.close(handle)
        raise
    if is_taken:
        os.close(handle)
        return None
    return Lock(path, handle)


def wait_for_lock(path: Path, timeout_s: float) -> Lock | None:
    """Take a lock as soon as it is free; None if it isn't within the time.

    Args:
        path: As for ``try_lock``.
        timeout_s: Seconds, 0 or more.
    """
    deadline = time.monotonic() + timeout_s
    while (lock := try_lock(path)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return lock


def is_locked(path: Path) -> bool:
    """Tell whether a lock is held, without making its file.

    Raises:
        OSError: as for ``try_lock``.
    """
    try:
        lock = _lock(path, open_own(path, os.O_RDWR))
    except FileNotFoundError:
        return False
    if lock is None:
        return True
    lock.release()
    return False


if sys.platform == "win32":
    import msvcrt

    def take(handle: int) -> bool:
        """Lock an open file; tell whether it was free."""
        os.lseek(handle, _REGION, os.SEEK_SET)
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    def give(handle: int) -> None:
        """Unlock it."""
        os.lseek(handle, _REGION, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def take(handle: int) -> bool:
        """Lock an open file; tell whether it was free."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def give(handle: int) -> None:
        """Unlock it."""
        fcntl.flock(handle, fcntl.LOCK_UN)
