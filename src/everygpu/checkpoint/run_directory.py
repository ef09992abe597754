"""The checkpoints of one run: a directory with one of them per step, named ``step-00001200``."""

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from everygpu.checkpoint.directory import find_replaced, left_names, remove_directory
from everygpu.checkpoint.format import find_altered, is_claimed, is_ours, read_document
from everygpu.errors import CheckpointError

Mode: TypeAlias = Literal["min", "max"]
"""Whether a metric is better when it is lower or higher."""

_NAME = re.compile(r"step-(\d{8,})")


class Best(NamedTuple):
    """Which checkpoints stay beside the newest: the ``num`` best by a metric."""

    metric: str
    mode: Mode
    num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One checkpoint of a run."""

    path: Path
    step: int
    serial: int
    """Counts the run's saves: the highest was written last, also after the run went back to an earlier step. -1 where
    the checkpoint can't be read, or a file is of another size than it should be."""
    metrics: dict[str, float]
    num_nonfinite: int
    """How many tensors of the model have values that are nan or infinite."""

    @property
    def is_readable(self) -> bool:
        return self.serial >= 0


def step_path(directory: Path, step: int) -> Path:
    """Name the checkpoint of a step."""
    return directory / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step that a checkpoint's name tells; None for another name."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def is_run_directory(path: Path) -> bool:
    """Tell whether a directory holds checkpoints of steps and is not one itself."""
    return path.is_dir() and not is_claimed(path) and bool(list_saved(path))


def list_saved(directory: Path) -> list[Saved]:
    """List a run's checkpoints, the one written last first; what only has the name of one is left out.

    A damaged one stands first if its step is beyond those of all others, else last.
    """
    if not directory.is_dir():
        return []
    names = {entry.name for entry in directory.iterdir()} | left_names(directory)
    found = [_look(directory / name) for name in names if _NAME.fullmatch(name)]
    saved = [one for one in found if one is not None]
    last_step = max((s.step for s in saved if s.is_readable), default=-1)
    return sorted(saved, key=lambda s: (not s.is_readable and s.step > last_step, s.serial, s.step), reverse=True)


def best_first(saved: Iterable[Saved], metric: str, mode: Mode) -> list[Saved]:
    """Sort those that have a metric, of equal ones the earlier first."""
    sign = 1 if mode == "min" else -1
    having = [s for s in saved if s.is_readable and metric in s.metrics]
    return sorted(having, key=lambda s: (sign * s.metrics[metric], s.serial))


class Rotation:
    """Removes all but the newest whole checkpoints and the best ones; each is read once to see that it is whole.

    Args:
        directory: Of the run.
        keep: How many of the newest stay.
        best: Which others stay.
    """

    def __init__(self, directory: Path, keep: int, best: Best | None) -> None:
        self._directory, self._keep, self._best = directory, keep, best
        self._whole: dict[Path, tuple[object, bool]] = {}

    def trust(self, path: Path) -> None:
        """Take a checkpoint for whole without reading it: its digests were made while it was written."""
        self._whole[path] = (_stamp(path), True)

    def rotate(self) -> None:
        """Remove what need not stay; nothing else may be saving in the directory.

        Of those whose models have the fewest tensors with values that are not finite, the newest stays as well. A
        checkpoint with altered bytes doesn't count, and stays until enough whole ones are newer.
        """
        saved = list_saved(self._directory)
        readable = [s for s in saved if s.is_readable]
        if len(saved) == len(readable) <= self._keep:  # nothing to remove, and no need to read
            return
        stay = self._until_whole(readable, self._keep)
        stay |= self._until_whole(sorted(readable, key=lambda s: s.num_nonfinite), 1)
        if self._best is not None:
            stay |= self._until_whole(best_first(readable, self._best.metric, self._best.mode), self._best.num)
        for old in saved:
            if old.path not in stay and is_ours(old.path):
                remove_directory(old.path)
                self._whole.pop(old.path, None)

    def _until_whole(self, saved: Iterable[Saved], num_whole: int) -> set[Path]:
        """Take checkpoints in their order until so many of them are whole."""
        taken: set[Path] = set()
        for one in saved:
            if num_whole == 0:
                break
            taken.add(one.path)
            num_whole -= self._is_whole(one.path)
        return taken

    def _is_whole(self, path: Path) -> bool:
        stamp = _stamp(path)
        if self._whole.get(path, (None,))[0] != stamp:
            try:
                self._whole[path] = (stamp, not find_altered(path, read_document(path)))
            except CheckpointError:
                self._whole[path] = (stamp, False)
        return self._whole[path][1]


def _look(path: Path) -> Saved | None:
    if path.is_symlink() or (path.exists() and not is_claimed(path)):
        return None
    step = int(path.name.removeprefix("step-"))
    try:
        run: Any = read_document(path if path.exists() else find_replaced(path) or path)["run"]
        metrics = {str(name): float(value) for name, value in run["metrics"].items()}
        serial, num_nonfinite = int(run["serial"]), int(run["num_nonfinite"])
        if serial < 0 or not all(map(math.isfinite, metrics.values())):
            raise ValueError
        return Saved(path=path, step=step, serial=serial, metrics=metrics, num_nonfinite=num_nonfinite)
    except (CheckpointError, LookupError, TypeError, ValueError, AttributeError):
        return Saved(path=path, step=step, serial=-1, metrics={}, num_nonfinite=0)


def _stamp(path: Path) -> object:
    try:
        with os.scandir(path) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return frozenset()
    return frozenset((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
