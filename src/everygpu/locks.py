"""Lock an open file; the operating system unlocks it when the process ends."""

import os
import sys

# On Windows a locked region can't be read by others, so it lies far behind the text.
_REGION = 1 << 30

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
