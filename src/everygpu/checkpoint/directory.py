"""Directories of checkpoints: one that takes its name when it is complete, and those of a run, one per step.

The old one is there until the new one has its name. A run's checkpoints are named ``step-00001200``.
"""

import ctypes
import errno
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any, Literal, TypeAlias
from warnings import warn

from filelock import FileLock, Timeout

from everygpu.checkpoint.format import DOCUMENT, is_claimed, is_file_of_ours, is_ours, read_document, sync_path
from everygpu.errors import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointForeignError,
    CheckpointNotFoundError,
    OptionError,
)

Mode: TypeAlias = Literal["min", "max"]
"""Whether a metric is better when it is lower or higher."""

Best: TypeAlias = tuple[str, Mode, int]
"""A metric, and how many of the best checkpoints by it stay beside the newest."""

_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
_LOOKS, _LOOK_AGAIN_S = 5, 0.002
_NAME = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"\.(step-\d{8,})\.(tmp|old)")


def as_path(path: str | os.PathLike[str], caller: str) -> Path:
    """Turn what the caller was given into a path; ``~`` at its begin is the home, as a shell has it."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise OptionError(f"{caller}: {path!r} is no path. Pass a str or Path, for instance 'checkpoints/last'.")
    return Path(os.path.expanduser(text))


def resolve_target(path: Path) -> Path:
    """Follow symbolic links to the directory to write, and refuse to replace what is no checkpoint of ours."""
    target = Path(os.path.realpath(path))
    if not target.exists():
        return target
    if not target.is_dir():
        raise CheckpointForeignError(
            f"save: {path} is a file, a checkpoint is a directory. Choose a name without a file, for instance "
            f"{path.with_suffix('')}."
        )
    problem = ""
    if target.samefile("."):  # once it is replaced, relative paths would lead nowhere
        problem = "the working directory"
    elif not is_ours(target) and (others := sorted(os.listdir(target))):
        problem = f"a directory with {others[0]!r} in it and no checkpoint of everygpu. Nothing was changed"
    if problem:
        raise CheckpointForeignError(
            f"save: {str(path)!r} is {problem}. Choose a directory inside, for instance {path / 'last'}."
        )
    return target


@contextmanager
def must_be_writable(path: Path, caller: str) -> Iterator[None]:
    """Raise the system's errors in the block as ours; what was at the path is whole."""
    try:
        yield
    except CheckpointError:  # some of ours are errors of the system as well
        raise
    except OSError as cause:
        todo = "Make room, or choose another place."
        if cause.errno == errno.EMFILE:
            todo = "Close files, or allow more of them, as `ulimit -n 65536` does."
        raise CheckpointError(
            f"{caller}: {path} can't be written: {cause}. What was there before is untouched. {todo}"
        ) from cause


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Keep every other saver away until the block ends, in this process and in others; ends with its holder."""
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout as cause:
        raise CheckpointBusyError(
            f"Another saver is writing to {path.parent}: {path.name} there is locked. Wait for it, or choose another "
            f"place."
        ) from cause
    try:
        yield
    finally:
        if lock.is_locked:  # not in a forked process
            with suppress(OSError):
                path.unlink()  # while it is held: who has opened it meanwhile finds it gone, and makes a new one
            lock.release()


@contextmanager
def replacing(target: Path, *, is_file: bool = False, is_locked: bool = False) -> Iterator[Path]:
    """Yield an empty directory or file beside the target; it takes the target's place when the block ends.

    Whenever the process dies, a complete checkpoint is under the target's name: the two are exchanged in one step
    where the system can, else the old one is renamed first, to where `find_directory` looks. What others have put
    beside the checkpoint goes along, such as a ``config.json``.
    """
    for parent in reversed([target.parent, *target.parent.parents]):
        if not parent.exists():
            parent.mkdir(exist_ok=True)
            sync_path(parent.parent)
    with nullcontext() if is_locked else hold_lock(_beside(target, "lock")):
        new = _beside(target, "tmp")
        if is_file:
            _remove(new)
            new.touch(exist_ok=False)
        else:
            clear_leftovers(target)
            new.mkdir()
        try:
            if target.exists():
                shutil.copymode(target, new)
            yield new
            for entry in target.iterdir() if target.is_dir() and not is_file else ():
                if is_file_of_ours(entry.name):
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.copytree(entry, new / entry.name, symlinks=True)
                else:
                    shutil.copy2(entry, new / entry.name, follow_symlinks=False)
            sync_path(new)
            _replace(new, target)
        finally:
            _remove(new)


def find_directory(path: Path) -> Path:
    """Find the checkpoint under a path, also where a save was cut off between two renames."""
    for _ in range(_LOOKS):
        if path.exists():
            return path
        sleep(_LOOK_AGAIN_S)  # where directories can't be exchanged, a save may be between its two renames
    replaced = _find_replaced(path)
    if replaced is None:
        raise CheckpointNotFoundError(f"load: No checkpoint at {path}. Check the path, or save one first.")
    warn(f"load: {path} is missing, as a save was cut off; the one before it is taken.", stacklevel=4)
    return replaced


def clear_leftovers(target: Path) -> None:
    """Remove what a saver that was killed has left, and put back what it had moved; no other may be saving there."""
    if not target.exists() and (old := _find_replaced(target)) is not None:
        os.rename(old, target)
    _remove(_beside(target, "old"))
    _remove(_beside(target, "tmp"))


def exchange(first: Path, second: Path) -> bool:
    """Give two paths each other's name in one step; tell whether the system and the file system can.

    Source:
        ``renameat2`` with ``RENAME_EXCHANGE``, which the os module lacks.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(second))


def _replace(new: Path, target: Path) -> None:
    """Give a directory or file the target's name, and take that back where it can't be made durable."""
    are_directories = new.is_dir() and target.is_dir()  # a file replaces a file in one step anyway
    is_exchanged = are_directories and exchange(new, target)
    is_moved = are_directories and not is_exchanged
    old = _beside(target, "old")
    if is_moved:
        os.rename(target, old)
    try:
        if not is_exchanged:
            os.replace(new, target)
        sync_path(target.parent)
    except BaseException:
        if is_exchanged:
            exchange(new, target)
        elif target.is_dir() and not new.exists():
            os.rename(target, new)
        if is_moved:
            os.rename(old, target)
        raise
    if is_moved:
        _remove(old)


def _find_replaced(path: Path) -> Path | None:
    """Find what a save that was cut off between its two renames has left of a missing checkpoint."""
    old = _beside(Path(os.path.realpath(path)), "old")
    return old if (old / DOCUMENT).exists() and not old.is_symlink() else None


def _beside(target: Path, what: str) -> Path:
    """Name what is next to a target: its ``lock``, what is being written (``tmp``), what was replaced (``old``)."""
    return target.with_name(f".{target.name}.{what}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One checkpoint of a run."""

    path: Path
    step: int
    serial: int = -1
    """Counts the run's saves: the highest was written last, also after the run went back to an earlier step. -1 where
    the checkpoint can't be read, or a file is of another size than it should be."""
    metrics: dict[str, float]
    problem: str = ""
    """What is wrong where it can't be read."""

    @property
    def is_readable(self) -> bool:
        return self.serial >= 0


def step_path(directory: Path, step: int) -> Path:
    """Name the checkpoint of a step."""
    return directory / f"step-{step:08d}"


def is_run_directory(path: Path) -> bool:
    """Tell whether a directory holds checkpoints of steps and is not one itself."""
    return path.is_dir() and not is_claimed(path) and bool(list_saved(path))


def list_saved(directory: Path) -> list[Saved]:
    """List a run's checkpoints, the one written last first; what only has the name of one is left out.

    A damaged one stands first if its step is beyond those of all others, else last.
    """
    if not directory.is_dir():
        return []
    paths = {entry for entry in directory.iterdir() if _NAME.fullmatch(entry.name)}
    paths |= {path for path in list_interrupted(directory) if _find_replaced(path) is not None}
    saved = [one for one in map(_look, paths) if one is not None]
    last_step = max((s.step for s in saved if s.is_readable), default=-1)
    return sorted(saved, key=lambda s: (not s.is_readable and s.step > last_step, s.serial, s.step), reverse=True)


def list_interrupted(directory: Path) -> set[Path]:
    """Name the checkpoints of which a killed saver has left something."""
    found = [_LEFT.fullmatch(entry.name) for entry in directory.iterdir()]
    return {directory / match[1] for match in found if match}


def best_first(saved: Iterable[Saved], metric: str, mode: Mode) -> list[Saved]:
    """Sort those that have a metric, of equal ones the earlier first."""
    sign = 1 if mode == "min" else -1
    having = [s for s in saved if s.is_readable and metric in s.metrics]
    return sorted(having, key=lambda s: (sign * s.metrics[metric], s.serial))


def rotate(directory: Path, keep: int, best: Best | None) -> None:
    """Remove all but the newest checkpoints and the best ones; nothing else may be saving in the directory.

    The one that was written last is whole, as its digests were made while it was written: so one always is.
    """
    saved = list_saved(directory)
    readable = [s for s in saved if s.is_readable]
    stay = {s.path for s in readable[:keep]}
    if best is not None:
        stay |= {s.path for s in best_first(readable, *best[:2])[: best[2]]}
    for old in saved if len(readable) >= keep else ():
        if old.path not in stay and is_ours(old.path):
            left = _beside(old.path, "tmp")  # wherever the process dies, it is there as a whole or not at all
            os.rename(old.path, left)
            _remove(left)


def _look(path: Path) -> Saved | None:
    if path.is_symlink() or (path.exists() and not is_claimed(path)):
        return None
    step = int(path.name.removeprefix("step-"))
    try:
        run: Any = read_document(path if path.exists() else _beside(path, "old"))["run"]
        metrics = {str(name): float(value) for name, value in run["metrics"].items()}
        serial = int(run["serial"])
        if serial < 0 or not all(map(math.isfinite, metrics.values())):
            raise ValueError
        return Saved(path=path, step=step, serial=serial, metrics=metrics)
    except CheckpointError as error:
        return Saved(path=path, step=step, metrics={}, problem=str(error))
    except (LookupError, TypeError, ValueError, AttributeError):
        return Saved(path=path, step=step, metrics={}, problem=f"{path} has no place in a run.")
