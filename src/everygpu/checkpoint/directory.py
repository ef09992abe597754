"""A directory that is renamed to its name when complete, with the old one kept until then."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO
from warnings import warn

from everygpu.checkpoint.manifest import FILE_NAMES, MANIFEST_FILE
from everygpu.errors import CheckpointForeignError, CheckpointNotFoundError


def resolve_target(path: Path) -> Path:
    """Follow symbolic links to the directory to write, and refuse to replace what is no checkpoint.

    Args:
        path: Where the caller wants the checkpoint; links may point to nothing yet.
    Returns:
        The absolute path without links.
    Raises:
        CheckpointForeignError: a file is there, or a directory that holds anything but a checkpoint.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_dir():
        raise CheckpointForeignError(
            f"save: the path must be free or a checkpoint directory, got the file {path}. "
            f"Choose a name without a file, for instance {path.with_suffix('')}."
        )
    foreign = sorted(entry.name for entry in target.iterdir() if not _is_ours(entry)) if target.exists() else []
    if foreign:
        raise CheckpointForeignError(
            f"save: the directory must hold nothing but a checkpoint, as it is replaced as a whole, "
            f"got {path} with {foreign[0]!r} in it. Choose a directory inside, for instance {path / 'last'}."
        )
    return target


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory beside the target; it takes the target's place when the block ends.

    A directory can't be renamed over one that is not empty, so the old one is renamed to a hidden
    sibling first and removed last. Whenever the process dies, one complete checkpoint is under the target's
    name or, between the two renames, under the sibling's, where `find_directory` looks. If the block or a
    step of the exchange fails, the old one is put back and the new one is removed.

    Args:
        target: As `resolve_target` returned it. Missing parents are made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    new = _sibling(target, "tmp")
    new.mkdir()
    try:
        if target.exists():
            shutil.copymode(target, new)
        yield new
        _sync_directory(new)
        _replace(new, target)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


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
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointForeignError(
            f"load: the path must be a directory that everygpu.save wrote, got the file {path}. Pass the directory."
        )
    target = Path(os.path.realpath(path))
    replaced = [old for old in _replaced(target) if (old / MANIFEST_FILE).exists()]
    if not replaced:
        raise CheckpointNotFoundError(
            f"load: a checkpoint must exist, got {path} with nothing there. Check the path or save one first."
        )
    newest = max(replaced, key=lambda old: (old / MANIFEST_FILE).stat().st_mtime_ns)
    warn(f"load: {path} is missing as a save was cut off; the one before it is taken.", stacklevel=4)
    return newest


def _replace(new: Path, target: Path) -> None:
    old = _sibling(target, "old")
    had_old = target.exists()
    if had_old:
        os.rename(target, old)
    try:
        os.rename(new, target)
        try:
            _sync_directory(target.parent)
        except BaseException:
            os.rename(target, new)
            raise
    except BaseException:
        if had_old:
            os.rename(old, target)
        raise
    for replaced in _replaced(target):
        _remove(replaced)


def _remove(directory: Path) -> None:
    """Remove what was replaced, the manifest first: without it, a part is not taken for a checkpoint."""
    with suppress(OSError):
        (directory / MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(directory)


def _replaced(target: Path) -> list[Path]:
    pattern = re.compile(rf"\.{re.escape(target.name)}\.old-\d+-[0-9a-f]{{8}}")
    if not target.parent.is_dir():
        return []
    return [entry for entry in target.parent.iterdir() if pattern.fullmatch(entry.name)]


def _sibling(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}-{os.getpid()}-{token_hex(4)}")


def _is_ours(entry: Path) -> bool:
    return entry.name in FILE_NAMES and entry.is_file()


def _sync_directory(directory: Path) -> None:
    """Make the directory's entries durable; Windows has no call for that."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
