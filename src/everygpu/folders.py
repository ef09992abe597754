"""Where small files of this user go: those of running processes, and what is worth keeping."""

import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_OWNER_ONLY = 0o700
_WRITABLE_BY_OTHERS = 0o022
_MAX_BYTES = 2**26


def runtime_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Make the folder for files that matter only while processes run: locks, and figures of a run.

    Args:
        environ: As ``os.environ``.
    Returns:
        A folder that only this user can write to: below ``XDG_RUNTIME_DIR``, else in the system's folder for
        temporary files, else in ``cache_folder``.
    Raises:
        OSError: none of them can be made.
    Source:
        XDG base directory specification. A folder of another user, or one that others can write to, is not used.
    """
    environ = os.environ if environ is None else environ
    if sys.platform == "win32":
        return _make(_windows_folder(environ) / "run")
    return _first(
        lambda: _make_own(_check_own(_absolute(environ.get("XDG_RUNTIME_DIR", ""))) / "everygpu"),
        _shared_folder,
        lambda: _make_own(_home_cache(environ) / "run"),
    )


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Make the folder for what was measured once and holds for longer than a run.

    Args:
        environ: As ``os.environ``.
    Returns:
        ``$XDG_CACHE_HOME/everygpu``, by default ``~/.cache/everygpu``; ``%LOCALAPPDATA%`` on Windows. Where there
        is no home, or it can't be written, a folder in the system's folder for temporary files.
    Raises:
        OSError: none of them can be made.
    Source:
        XDG base directory specification.
    """
    environ = os.environ if environ is None else environ
    if sys.platform == "win32":
        return _make(_windows_folder(environ) / "cache")
    return _first(lambda: _check_writable(_home_cache(environ)), lambda: _make_own(_shared_folder() / "cache"))


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


def read_json(path: Path) -> Any:
    """Read a file that ``write_whole`` wrote, or whatever lies in its place.

    Args:
        path: The file.
    Returns:
        Its content: JSON of any type.
    Raises:
        OSError: it can't be read, or is no regular file of this user.
        ValueError: it is no JSON, or is too large or too deep.
    """
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"read_json: {path} must have at most {_MAX_BYTES} bytes, got more.")
    try:
        return json.loads(text)
    except RecursionError as cause:
        raise ValueError(f"read_json: {path} must be JSON of moderate depth.") from cause


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user: no link, whose target would be written to, and no pipe, which would wait.

    Args:
        path: The file.
        flags: As for ``os.open``; made files are readable by this user only.
    Returns:
        A descriptor, closed in started programs.
    Raises:
        OSError: it can't be opened, or is something else.
    """
    more = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags | more, 0o600)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or not _is_own(found):
            raise PermissionError(f"{path} must be a regular file of this user")
    except BaseException:
        os.close(handle)
        raise
    return handle


def _first(*makers: Callable[[], Path]) -> Path:
    """Return the first folder that can be made."""
    for make in makers[:-1]:
        try:
            return make()
        except OSError:
            continue
    return makers[-1]()


def _absolute(folder: str) -> Path:
    # The specification has relative paths ignored.
    if not os.path.isabs(folder):
        raise FileNotFoundError(f"no folder is named by {folder!r}")
    return Path(folder)


def _home_cache(environ: Mapping[str, str]) -> Path:
    told = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(told):
        return _make(Path(told) / "everygpu")
    try:
        return _make(Path.home() / ".cache" / "everygpu")
    except RuntimeError as cause:  # HOME is not set, and the user has no entry in passwd: so it is in some containers
        raise FileNotFoundError(f"this user has no home: {cause}") from cause


def _shared_folder() -> Path:
    """Make a folder of this user among those of others."""
    return _make_own(Path(tempfile.gettempdir()) / f"everygpu-{_uid()}")


def _windows_folder(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("LOCALAPPDATA") or tempfile.gettempdir()) / "everygpu"


def _make(folder: Path) -> Path:
    folder.mkdir(mode=_OWNER_ONLY, parents=True, exist_ok=True)
    return folder


def _make_own(folder: Path) -> Path:
    folder.mkdir(mode=_OWNER_ONLY, exist_ok=True)
    return _check_own(folder)


def _check_own(folder: Path) -> Path:
    """Return a folder that is this user's, and that no other user can write to."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _is_own(found) or found.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(f"{folder} must be a folder that only this user can write to")
    return _check_writable(folder)


def _check_writable(folder: Path) -> Path:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} can't be written")
    return folder


def _is_own(found: os.stat_result) -> bool:
    return sys.platform == "win32" or found.st_uid == _uid()


def _uid() -> int:
    return -1 if sys.platform == "win32" else os.geteuid()
