"""The checkpoints of one run: a directory with one of them per step, named ``step-00001200``."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from everygpu.checkpoint.directory import beside, clear_leftovers, find_replaced, remove_directory
from everygpu.checkpoint.format import find_altered, is_claimed, is_ours, read_document
from everygpu.errors import CheckpointError

Mode: TypeAlias = Literal["min", "max"]
"""Whether a metric is better when it is lower or higher."""

_NAME = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"\.(step-\d{8,})\.(tmp|old)")


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
    paths |= {path for path in _left(directory) if find_replaced(path) is not None}
    saved = [one for one in map(_look, paths) if one is not None]
    last_step = max((s.step for s in saved if s.is_readable), default=-1)
    return sorted(saved, key=lambda s: (not s.is_readable and s.step > last_step, s.serial, s.step), reverse=True)


def clear_run(directory: Path) -> None:
    """Clear what killed savers have left; no other may be saving."""
    for path in _left(directory):
        clear_leftovers(path)


def best_first(saved: Iterable[Saved], metric: str, mode: Mode) -> list[Saved]:
    """Sort those that have a metric, of equal ones the earlier first."""
    sign = 1 if mode == "min" else -1
    having = [s for s in saved if s.is_readable and metric in s.metrics]
    return sorted(having, key=lambda s: (sign * s.metrics[metric], s.serial))


class Rotation:
    """Removes all but the newest whole checkpoints and the best ones; each is read once to see that it is whole."""

    def __init__(self, directory: Path, keep: int, best: Best | None) -> None:
        self._directory, self._keep, self._best = directory, keep, best
        self._is_whole: dict[Path, bool] = {}

    def trust(self, path: Path) -> None:
        """Take a checkpoint for whole without reading it: its digests were made while it was written."""
        self._is_whole[path] = True

    def rotate(self) -> None:
        """Remove what need not stay; nothing else may be saving in the directory.

        A checkpoint with altered bytes doesn't count, and stays until enough whole ones are newer.
        """
        saved = list_saved(self._directory)
        readable = [s for s in saved if s.is_readable]
        if len(saved) == len(readable) <= self._keep:  # nothing to remove, and no need to read
            return
        stay = self._until_whole(readable, self._keep)
        if self._best is not None:
            stay |= self._until_whole(best_first(readable, self._best.metric, self._best.mode), self._best.num)
        for old in saved:
            if old.path not in stay and is_ours(old.path):
                remove_directory(old.path)
                self._is_whole.pop(old.path, None)

    def _until_whole(self, saved: Iterable[Saved], num_whole: int) -> set[Path]:
        """Take checkpoints in their order until so many of them are whole."""
        taken: set[Path] = set()
        for one in saved:
            if num_whole == 0:
                break
            taken.add(one.path)
            if one.path not in self._is_whole:
                try:
                    self._is_whole[one.path] = not find_altered(one.path, read_document(one.path))
                except CheckpointError:
                    self._is_whole[one.path] = False
            num_whole -= self._is_whole[one.path]
        return taken


def _left(directory: Path) -> set[Path]:
    """Name the checkpoints of which a killed saver has left something."""
    found = [_LEFT.fullmatch(entry.name) for entry in directory.iterdir()]
    return {directory / match[1] for match in found if match}


def _look(path: Path) -> Saved | None:
    if path.is_symlink() or (path.exists() and not is_claimed(path)):
        return None
    step = int(path.name.removeprefix("step-"))
    try:
        run: Any = read_document(path if path.exists() else beside(path, "old"))["run"]
        metrics = {str(name): float(value) for name, value in run["metrics"].items()}
        serial = int(run["serial"])
        if serial < 0 or not all(map(math.isfinite, metrics.values())):
            raise ValueError
        return Saved(path=path, step=step, serial=serial, metrics=metrics)
    except CheckpointError as error:
        return Saved(path=path, step=step, metrics={}, problem=str(error))
    except (LookupError, TypeError, ValueError, AttributeError):
        return Saved(path=path, step=step, metrics={}, problem=f"{path} has no place in a run.")
