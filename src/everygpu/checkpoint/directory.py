"""Checkpoint directories: a single one, replaced when a new one is complete, and those of a run, one per step.

A new directory is written under another name and renamed. An existing one stays, with all that other programs keep in
it: the save goes to a directory inside it, a rename makes that the checkpoint, and then its files are moved one by one.
Readers find each file in either place. A run's checkpoints are named ``step-00001200``.
"""

import errno
import logging
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from filelock import FileLock, Timeout

from everygpu.checkpoint.format import (
    DOCUMENT,
    FORMAT,
    PENDING,
    SUMS,
    files_in,
    is_claimed,
    is_marked,
    is_ours,
    is_pending,
    read_document,
    sync_path,
)
from everygpu.errors import CheckpointBusyError, CheckpointError, CheckpointForeignError, OptionError

logger = logging.getLogger("everygpu")

Mode: TypeAlias = Literal["min", "max"]
"""Whether a metric is better when it is lower or higher."""

Best: TypeAlias = tuple[str, Mode, int]
"""A metric, its mode, and how many of the best checkpoints to keep besides the newest."""

_STAGE = ".everygpu.tmp"
"""Name of what is being written: inside the target directory, or after a dot and the target's name."""
LOCK = ".everygpu.lock"
_NAME = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(rf"\.(step-\d{{8,}}){re.escape(_STAGE)}")


def as_path(path: str | os.PathLike[str], caller: str) -> Path:
    """Turn the caller's argument into a path; a leading ``~`` is the home directory, as in a shell."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        shown = repr(path) if path is None or isinstance(path, str | bytes | int) else f"a {type(path).__name__}"
        raise OptionError(f"{caller}: {shown} is no path. Pass a str or Path, for instance 'checkpoints/last'.")
    return Path(os.path.expanduser(text))


def resolve_target(path: Path, is_step: bool = False) -> Path:
    """Follow symbolic links to the directory to write; refuse what is no checkpoint of everygpu, nor a step."""
    target = Path(os.path.realpath(path))
    if not target.exists():
        return target
    if not target.is_dir():
        free = path.with_suffix("")
        raise CheckpointForeignError(
            f"save: {path} is a file, a checkpoint is a directory. Choose for instance {free}."
        )
    problem, here = "", Path(os.path.realpath("."))
    others = sorted(n for n in os.listdir(target) if not (n in (_STAGE, PENDING) and _is_left(target / n, gone=True)))
    if target.samefile(here):
        problem = "the working directory"
    elif here.is_relative_to(target):
        problem = "a directory around the working directory"
    elif os.path.ismount(target):
        problem = "a mount point"
    elif others and not is_step and not is_ours(target):
        problem = f"a directory with {others[0]!r} in it and no checkpoint of everygpu. Nothing was changed"
    if problem:
        raise CheckpointForeignError(f"save: {str(path)!r} is {problem}. Choose for instance {path / 'last'}.")
    return target


@contextmanager
def must_be_writable(path: Path, caller: str) -> Iterator[None]:
    """Raise OSErrors of the block as everygpu's errors; the old content of the path is intact."""
    try:
        yield
    except CheckpointError:  # some of everygpu's errors inherit from OSError
        raise
    except OSError as cause:
        more = "Close files, or allow more of them, as `ulimit -n 65536` does."
        todo = more if cause.errno == errno.EMFILE else "Free some space, or choose another place."
        raise CheckpointError(f"{caller}: {path} can't be written: {cause}. The old is untouched. {todo}") from cause


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Lock out every other saver until the block ends, in this process and others. The lock ends with its process."""
    with suppress(FileNotFoundError):  # where the system has no locks, filelock writes a process id
        if not stat.S_ISREG(path.lstat().st_mode) or not re.match(rb"\d+\s|$", path.read_bytes()):
            raise _in_the_way(path)
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout as cause:
        what = f"Another saver is writing to {path.parent}: {path.name} there is locked."
        raise CheckpointBusyError(f"{what} Wait for it, or choose another place.") from cause
    try:
        yield
    finally:
        if lock.is_locked:  # not in a forked process
            with suppress(OSError):
                path.unlink()  # while it is held: who has opened it meanwhile finds it gone, and makes a new one
            lock.release()


@contextmanager
def replacing(target: Path, *, is_file: bool = False, is_locked: bool = False) -> Iterator[Path]:
    """Yield an empty directory, or a file's path; what is written there replaces the target at the end, or never."""
    for parent in reversed([target.parent, *target.parent.parents]):
        if not parent.exists():
            parent.mkdir(exist_ok=True)
            sync_path(parent.parent)
    with nullcontext() if is_locked else hold_lock(_sibling(target, LOCK)):
        finish_interrupted_save(target)
        stage = target / _STAGE if target.is_dir() else _sibling(target, _STAGE)
        for place in (stage, target / PENDING):
            if os.path.lexists(place):
                raise _in_the_way(place)
        stage.mkdir()
        try:
            (stage / DOCUMENT).write_text(f'{{"format": "{FORMAT}"}}', encoding="utf-8")  # whose it is if we are killed
            if target.exists():  # what only its owner may read stays so, also while it is written
                stage.chmod(stat.S_IMODE(stage.stat().st_mode) & ~0o077)
            yield stage / target.name if is_file else stage
            if is_file:
                _copy_mode(target, stage / target.name)
                sync_path(stage / target.name)
                os.replace(stage / target.name, target)
                sync_path(target.parent)
            else:
                _complete(stage, target)
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def finish_interrupted_save(target: Path) -> None:
    """Move the files of a complete save into place, and remove leftovers of a killed saver; needs the lock."""
    for stage in (target / _STAGE, _sibling(target, _STAGE)):
        if _is_left(stage):
            shutil.rmtree(stage)
    pending = target / PENDING
    if is_pending(target):
        new, old = files_in(pending), files_in(target)
        for name in old - {DOCUMENT}:
            # Without an index and digests, other programs see that something is missing, not files of two saves.
            if name not in new or (name.endswith((SUMS, ".json")) and (pending / name).exists()):
                (target / name).unlink(missing_ok=True)
        for name in sorted(os.listdir(pending), key=lambda name: (name == DOCUMENT, name.endswith((SUMS, ".json")))):
            if name == DOCUMENT:  # the last one, by which readers know of the others
                sync_path(target)
            os.replace(pending / name, target / name)
    if _is_left(pending):
        pending.rmdir()


def _complete(stage: Path, target: Path) -> None:
    """Make a directory the checkpoint, or undo that if it can't be synced to disk."""
    place = target / PENDING if stage.parent == target else target
    if place != target:
        ours, document = files_in(target), target / DOCUMENT
        for name in os.listdir(stage):
            if name not in ours and os.path.lexists(target / name):
                raise _in_the_way(target / name)
            _copy_mode(target / name if name in ours else document, stage / name)
        _copy_mode(target, stage)
    sync_path(stage)
    os.rename(stage, place)
    try:
        sync_path(place.parent)
    except BaseException:
        _remove(target) if place == target else os.rename(place, stage)
        raise
    try:
        finish_interrupted_save(target)
    except OSError as error:
        logger.warning("save: %s is saved; the next save puts its files in place: %s", target, error)


def _remove(path: Path) -> None:
    """Remove a checkpoint, but not the files of other programs in it."""
    names, left = files_in(path), path
    if names.issuperset(os.listdir(path)):  # wherever the process dies, it is there as a whole or not at all
        left = _sibling(path, _STAGE)
        os.rename(path, left)
    for name in sorted(names, key=lambda name: name == DOCUMENT):
        (left / name).unlink(missing_ok=True)
    if not os.listdir(left):
        left.rmdir()


def _copy_mode(of: Path, to: Path) -> None:
    if of.exists():
        shutil.copymode(of, to)


def _is_left(directory: Path, *, gone: bool = False) -> bool:
    """Whether a killed saver left a directory: it has our mark, or no bytes. ``gone`` if another saver has moved it."""
    try:
        if not stat.S_ISDIR(directory.lstat().st_mode):
            return False
        return is_marked(directory) or all(e.name == DOCUMENT and e.lstat().st_size == 0 for e in directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return gone


def _in_the_way(path: Path) -> CheckpointForeignError:
    return CheckpointForeignError(f"{path} is in the way: it is not of everygpu. Nothing was changed; move it.")


def _sibling(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}{what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One checkpoint of a run."""

    path: Path
    step: int
    serial: int = -1
    """Counts the run's saves, also after it went back to an earlier step; -1 where the checkpoint can't be read."""
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
    """Whether a directory holds checkpoints of steps and is not one itself."""
    return path.is_dir() and not is_claimed(path) and bool(list_saved(path))


def list_saved(directory: Path) -> list[Saved]:
    """List a run's checkpoints, the one written last first, before it damaged ones of later steps."""
    if not directory.is_dir():
        return []
    paths = [entry for entry in directory.iterdir() if _NAME.fullmatch(entry.name)]
    saved = [one for one in map(read_saved_step, paths) if one is not None]
    last_step = max((s.step for s in saved if s.is_readable), default=-1)
    return sorted(saved, key=lambda s: (not s.is_readable and s.step > last_step, s.serial, s.step), reverse=True)


def finish_interrupted_saves(directory: Path) -> None:
    """Finish interrupted saves of all checkpoints of a run."""
    found = [_LEFT.fullmatch(entry.name) for entry in directory.iterdir()]
    for path in {saved.path for saved in list_saved(directory)} | {directory / left[1] for left in found if left}:
        finish_interrupted_save(path)


def best_first(saved: Iterable[Saved], metric: str, mode: Mode) -> list[Saved]:
    """Sort the checkpoints that have a metric, the best first; the earlier first among equals."""
    sign = 1 if mode == "min" else -1
    having = [s for s in saved if s.is_readable and metric in s.metrics]
    return sorted(having, key=lambda s: (sign * s.metrics[metric], s.serial))


def rotate(directory: Path, keep: int, best: Best | None) -> None:
    """Remove all checkpoints but the newest and the best; the one written last is intact."""
    saved = list_saved(directory)
    readable = [s for s in saved if s.is_readable]
    stay = {s.path for s in readable[:keep]}
    if best is not None:
        stay |= {s.path for s in best_first(readable, *best[:2])[: best[2]]}
    for old in saved if len(readable) >= keep else ():
        if old.path not in stay and is_ours(old.path):
            _remove(old.path)


def read_saved_step(path: Path) -> Saved | None:
    if path.is_symlink() or not is_claimed(path):
        return None
    step, problem = int(path.name.removeprefix("step-")), f"{path} has no place in a run."
    try:
        document = read_document(path)
        if "run" not in document:  # of everygpu.save
            return None
        run: Any = document["run"]
        metrics = {str(name): float(value) for name, value in run["metrics"].items()}
        are_counts = all(type(number) is int and number >= 0 for number in (run["step"], run["serial"]))
        if are_counts and all(map(math.isfinite, metrics.values())):
            return Saved(path=path, step=step, serial=run["serial"], metrics=metrics)
    except CheckpointError as error:
        problem = str(error)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        pass
    return Saved(path=path, step=step, metrics={}, problem=problem)
