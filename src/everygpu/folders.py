"""Where small files of this user go: those of running processes, and what is worth keeping."""

import os
import stat
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path, user_runtime_path


def runtime_folder() -> Path:
    """Make the folder for files that matter only while processes run, which only this user can write to.

    Returns:
        ``everygpu`` below ``XDG_RUNTIME_DIR``, else below the system's folder for the user, or for temporary files.
    Raises:
        OSError: it can't be made, or is another user's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs logs each fallback
        folder = user_runtime_path("everygpu", appauthor=False, ensure_exists=True)
    for level in (folder, folder.parent) if sys.platform == "linux" else ():  # which older platformdirs don't look at
        found = level.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{level} is not a folder that only this user can write to")
    return folder


def cache_folder() -> Path:
    """Make the folder for what was measured once: ``~/.cache/everygpu``, or in ``runtime_folder`` without a home.

    Raises:
        OSError: neither can be made.
    """
    with suppress(OSError, RuntimeError):
        folder = user_cache_path("everygpu", appauthor=False, ensure_exists=True)
        if folder.is_absolute() and os.access(folder, os.W_OK | os.X_OK):
            return folder
    folder = runtime_folder() / "cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def write_whole(path: Path, text: str) -> None:
    """Write a file so that readers see the old text or the new, never a part of it.

    Raises:
        OSError: it can't be written; the old file stays.
    Source:
        ``os.replace``. Nothing is synced: after a power failure such a file has no use.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
