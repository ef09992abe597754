"""A directory that is renamed to its name when complete, with the old one kept until then."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from stat import S_ISDIR, S_ISREG
from time import sleep
from typing import BinaryIO
from warnings import warn

from everygpu.checkpoint.lock import hold_lock
from everygpu.checkpoint.manifest import FILE_NAMES, MANIFEST_FILE, STATE_FILE
from everygpu.errors import CheckpointForeignError, CheckpointNotFoundError, OptionError

_LEFT = re.compile(r"\.(?P<name>.+)\.(?P<what>tmp|old)-\d+-[0-9a-f]{8}")
"""Names of what is being written, and of what has just been replaced."""

_LOCK = re.compile(r"\.(?P<name>.+)\.lock")
_MAX_LOOKS = 5
_LOOK_AGAIN_S = 0.002


def resolve_target(path: Path) -> Path:
    """Follow symbolic links to the directory to write, and refuse to replace what is no checkpoint.

    Args:
        path: Where the caller wants the checkpoint; links may point to nothing yet.
    Returns:
        The absolute path without links.
    Raises:
        CheckpointForeignError: a file is there, the working directory, or a directory that holds anything but a
            checkpoint.
    """
    target = Path(os.path.realpath(path))
    if _is_working_directory(target):
        raise CheckpointForeignError(
            f"save: the path must not be the working directory, as it is replaced as a whole, got {str(path)!r}. "
            f"Choose a directory inside, for instance {path / 'last'}."
        )
    try:
        # One look at the path: another saver may move what is there at any moment.
        entries = list(target.iterdir())
        foreign = sorted(entry.name for entry in entries if not _is_ours(entry)) or _find_lone_tensors(target, entries)
    except (FileNotFoundError, NotADirectoryError) as cause:
        if not _is_no_directory(target):
            return target
        raise CheckpointForeignError(
            f"save: the path must be free or a checkpoint directory, got the file {path}. "
            f"Choose a name without a file, for instance {path.with_suffix('')}."
        ) from cause
    if foreign:
        raise CheckpointForeignError(
            f"save: the directory must hold nothing but a checkpoint, as it is replaced as a whole, "
            f"got {path} with {foreign[0]!r} in it. Choose a directory inside, for instance {path / 'last'}."
        )
    return target


def as_path(path: str | os.PathLike[str], caller: str) -> Path:
    """Turn what the caller was given into a path; ``~`` at its begin is the home, as a shell has it.

    Raises:
        OptionError: it is none, or empty.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise OptionError(
            f"{caller}: the path must be a str or Path that names a directory, got {path!r}. "
            f"Pass for instance 'checkpoints/last'."
        )
    return Path(os.path.expanduser(text))


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory beside the target; it takes the target's place when the block ends.

    A directory can't be renamed over one that is not empty, so the old one is renamed to a hidden
    sibling first and removed last. Whenever the process dies, one complete checkpoint is under the target's
    name or, between the two renames, under the sibling's, where `find_directory` looks. If the block or a
    step of the exchange fails, the old one is put back and the new one is removed. What savers that were
    killed have left is removed first: the lock tells that they are dead.

    Args:
        target: As `resolve_target` returned it. Missing parents are made.
    Raises:
        CheckpointBusyError: another saver is writing to the target.
    """
    _make_parents(target.parent)
    with hold_lock(target.with_name(f".{target.name}.lock")) as is_alone:
        if is_alone:
            for left in _siblings(target, "tmp"):
                shutil.rmtree(left, ignore_errors=True)
        new = new_sibling(target, "tmp")
        new.mkdir()
        try:
            if target.exists():
                shutil.copymode(target, new)
            yield new
            sync_path(new)
            _replace(new, target)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


def written_bytes(target: Path) -> int:
    """Sum what this process has written of the file or directory that is to take the target's place."""
    begin, total = f".{target.name}.tmp-{os.getpid()}-", 0
    with suppress(OSError):  # it takes the target's place at any moment
        for new in [entry for entry in target.parent.iterdir() if entry.name.startswith(begin)]:
            total += sum(file.stat().st_size for file in (new.iterdir() if new.is_dir() else [new]))
    return total


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file with the permissions that umask leaves; it is on the disk when the block ends."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def find_directory(path: Path) -> Path:
    """Find the checkpoint under a path, also where a save was cut off between its two renames.

    Args:
        path: Where the checkpoint was saved.
    Returns:
        The path, or the hidden sibling that holds what was there.
    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointForeignError: a file is there.
    """
    for _ in range(_MAX_LOOKS):
        if path.is_dir():
            return path
        if path.is_file():
            raise CheckpointForeignError(
                f"load: the path must be a directory that everygpu.save wrote, got the file {path}. Pass the directory."
            )
        sleep(_LOOK_AGAIN_S)  # a save may be between its two renames
    replaced = find_replaced(path)
    if replaced is None:
        raise CheckpointNotFoundError(
            f"load: a checkpoint must exist, got {path} with nothing there. Check the path or save one first."
        )
    warn(f"load: {path} is missing as a save was cut off; the one before it is taken.", stacklevel=4)
    return replaced


def find_replaced(path: Path) -> Path | None:
    """Find what a save that was cut off between its two renames has left of a missing checkpoint."""
    times = {}
    for old in _siblings(Path(os.path.realpath(path)), "old"):
        with suppress(OSError):  # without a manifest, or removed at this moment
            times[old] = (old / MANIFEST_FILE).stat().st_mtime_ns
    return max(times, key=times.__getitem__, default=None)


def remove_directory(target: Path) -> None:
    """Remove a checkpoint so that, wherever the process dies, it is there as a whole or not at all."""
    left = new_sibling(target, "tmp")
    os.rename(target, left)
    shutil.rmtree(left, ignore_errors=True)


def remove_leftovers(directory: Path, names: re.Pattern[str]) -> None:
    """Remove what savers that were killed have left, and put back what they had moved out of the way.

    A saver that is killed leaves its lock file too; the lock itself is free.

    Args:
        directory: Where they saved; the caller knows that none is saving there now.
        names: Matches the names they saved under.
    """
    for entry in list(directory.iterdir()):
        match = _LEFT.fullmatch(entry.name) or _LOCK.fullmatch(entry.name)
        if match is None or not names.fullmatch(match["name"]):
            continue
        target = directory / match["name"]
        if entry.name.endswith(".lock"):
            entry.unlink()
        elif not target.exists() and find_replaced(target) == entry:
            os.rename(entry, target)
        else:
            _remove(entry)


def _replace(new: Path, target: Path) -> None:
    old = new_sibling(target, "old")
    had_old = target.exists()
    if had_old:
        os.rename(target, old)
    try:
        os.rename(new, target)
        try:
            sync_path(target.parent)
        except BaseException:
            os.rename(target, new)
            raise
    except BaseException:
        if had_old:
            os.rename(old, target)
        raise
    for replaced in _siblings(target, "old"):
        _remove(replaced)


def _remove(directory: Path) -> None:
    """Remove what was replaced, the manifest first: without it, a part is not taken for a checkpoint."""
    with suppress(OSError):
        if directory.is_symlink():  # what it leads to is another checkpoint
            directory.unlink()
        if not is_real_directory(directory):
            return
        (directory / MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(directory)


def _siblings(target: Path, what: str) -> list[Path]:
    return [entry for entry in list_siblings(target, what) if is_real_directory(entry)]


def list_siblings(target: Path, what: str) -> list[Path]:
    """List what `new_sibling` has named."""
    if not target.parent.is_dir():
        return []
    found = [(entry, _LEFT.fullmatch(entry.name)) for entry in target.parent.iterdir()]
    return [entry for entry, match in found if match and (match["name"], match["what"]) == (target.name, what)]


def is_real_directory(path: Path) -> bool:
    """Tell a directory from a link to one: savers rename directories only, so that a link was put there otherwise."""
    try:
        found = os.lstat(path)
    except OSError:  # another saver removed it at this moment
        return False
    # Windows has directories that lead elsewhere, junctions, and lstat calls them directories.
    return S_ISDIR(found.st_mode) and not getattr(found, "st_reparse_tag", 0)


def _make_parents(directory: Path) -> None:
    """Make a directory and those above it, durably."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_path(path.parent)


def new_sibling(target: Path, what: str) -> Path:
    """Name what is written to take a path's place, ``tmp``, or was replaced, ``old``; as no other is named."""
    return target.with_name(f".{target.name}.{what}-{os.getpid()}-{token_hex(4)}")


def _is_ours(entry: Path) -> bool:
    """Tell whether an entry of a directory is a file of a checkpoint, or was one until it was moved a moment ago."""
    try:
        return entry.name in FILE_NAMES and S_ISREG(entry.stat().st_mode)
    except FileNotFoundError:
        return not entry.is_symlink()


def _is_working_directory(target: Path) -> bool:
    """Tell whether the program is in there: once it is replaced, relative paths would lead nowhere."""
    try:
        return target.samefile(".")
    except OSError:  # nothing is there yet
        return False


def _find_lone_tensors(target: Path, entries: list[Path]) -> list[str]:
    """List files with a checkpoint's names where there never was a checkpoint: weights of another origin."""
    marks = {MANIFEST_FILE, STATE_FILE}
    if any(entry.name in marks for entry in entries) or any((target / name).exists() for name in marks):
        return []
    return sorted(entry.name for entry in entries if entry.exists())


def _is_no_directory(path: Path) -> bool:
    try:
        return not S_ISDIR(path.stat().st_mode)
    except OSError:
        return False


def sync_path(path: Path) -> None:
    """Make a file's content, or a directory's entries, durable; Windows has no call for the latter."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
