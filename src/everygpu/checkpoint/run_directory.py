"""The checkpoints of one run: a directory with one of them per step, named ``step-00001200``."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from everygpu.checkpoint.directory import beside, clear_leftovers, find_replaced, remove_directory
from everygpu.checkpoint.format import is_claimed, is_ours, read_document
from everygpu.errors import CheckpointError

Mode: TypeAlias = Literal["min", "max"]
"""Whether a metric is better when it is lower or higher."""

Best: TypeAlias = tuple[str, Mode, int]
"""A metric, and how many of the best checkpoints by it stay beside the newest."""

_NAME = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"\.(step-\d{8,})\.(tmp|old)")


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


def rotate(directory: Path, keep: int, best: Best | None) -> None:
    """Remove all but the newest checkpoints and the best ones; nothing else may be saving in the directory.

    The one that was written last is whole, as its digests were made while it was written: so one always is.
    """
    saved = list_saved(directory)
    readable = [s for s in saved if s.is_readable]
    stay = {s.path for s in readable[:keep]}
    if best is not None:
        stay |= {s.path for s in best_first(readable, *best[:2])[: best[2]]}
    for old in saved if len(readable) > keep else ():
        if old.path not in stay and is_ours(old.path):
            remove_directory(old.path)


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
