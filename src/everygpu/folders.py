"""Where small files of this user go: those of running processes, and what is worth keeping."""

import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_OWNER_ONLY = 0o700


def runtime_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Make the folder for files that matter only while processes run: locks, and figures of a run.

    Args:
        environ: As ``os.environ``.
    Returns:
        A folder that only this user can read: below ``XDG_RUNTIME_DIR``, else in the system's folder for
        temporary files, else in ``cache_folder``.
    Raises:
        OSError: none of them can be made.
    Source:
        XDG base directory specification. The system's folder is shared, so a folder of ours that somebody
        else has made there is not used.
    """
    environ = os.environ if environ is None else environ
    if sys.platform == "win32":
        return _make(_windows_folder(environ) / "run")
    told = environ.get("XDG_RUNTIME_DIR", "")
    if told and os.access(told, os.W_OK | os.X_OK):
        return _make(Path(told) / "everygpu")
    shared = Path(tempfile.gettempdir()) / f"everygpu-{os.getuid()}"
    return shared if _is_ours(shared) else _make(cache_folder(environ) / "run")


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Make the folder for what was measured once and holds for longer than a run.

    Args:
        environ: As ``os.environ``.
    Returns:
        ``$XDG_CACHE_HOME/everygpu``, by default ``~/.cache/everygpu``; ``%LOCALAPPDATA%`` on Windows.
    Raises:
        OSError: it can't be made.
    Source:
        XDG base directory specification.
    """
    environ = os.environ if environ is None else environ
    if sys.platform == "win32":
        return _make(_windows_folder(environ) / "cache")
    told = environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    return _make((Path(told) if os.path.isabs(told) else Path.home() / ".cache") / "everygpu")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that readers see the old text or the new, never a part of it.

    Args:
        path: The file; its folder exists.
        text: All of it.
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


def _windows_folder(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("LOCALAPPDATA") or tempfile.gettempdir()) / "everygpu"


def _make(folder: Path) -> Path:
    folder.mkdir(mode=_OWNER_ONLY, parents=True, exist_ok=True)
    return folder


def _is_ours(folder: Path) -> bool:
    """Make a folder among those of other users; False if one of them was there first."""
    try:
        folder.mkdir(mode=_OWNER_ONLY, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
