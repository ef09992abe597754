"""The checkpoints of one run: a directory with one of them per step, named ``step-00001200``."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from everygpu.checkpoint.directory import find_replaced, is_real_directory, remove_directory, remove_leftovers
from everygpu.checkpoint.foreign.formats import is_native
from everygpu.checkpoint.lock import hold_lock
from everygpu.checkpoint.manifest import MANIFEST_FILE, Place, check_files, read_manifest
from everygpu.checkpoint.writable import must_be_writable
from everygpu.errors import CheckpointError, CheckpointForeignError

_Stamp: TypeAlias = frozenset[tuple[str, int, int, int]]
"""Name, inode, size and time of change of each file."""

Mode: TypeAlias = Literal["min", "max"]
"""Whether a metric is better when it is lower or higher."""

_NAME = re.compile(r"step-(\d{8,})")
_LEFT_NAME = re.compile(r"\.(step-\d{8,})\.old-\d+-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One checkpoint of a run."""

    path: Path
    step: int
    place: Place | None
    """None where the manifest can't be read, or a file beside it has another size than it says."""


class Verdicts:
    """Which checkpoints of a run are whole, each read once, and again when its files have changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[_Stamp, bool]] = {}

    def trust(self, path: Path) -> None:
        """Take a checkpoint for whole without reading it: its digests were made while it was written."""
        self._known[path] = (_stamp(path), True)

    def forget(self, path: Path) -> None:
        self._known.pop(path, None)

    def is_whole(self, path: Path) -> bool:
        """Tell whether every byte of a checkpoint is as it was written."""
        stamp = _stamp(path)
        if self._known.get(path, (None,))[0] != stamp:
            self._known[path] = (stamp, _agrees(path))
        return self._known[path][1]


def step_path(directory: Path, step: int) -> Path:
    """Name the checkpoint of a step."""
    return directory / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step that a checkpoint's name tells; None for another name."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def is_run_directory(path: Path) -> bool:
    """Tell whether a directory holds checkpoints of steps and is not one itself."""
    return path.is_dir() and not (path / MANIFEST_FILE).exists() and bool(_names(path))


def list_saved(directory: Path) -> list[Saved]:
    """List a run's checkpoints, the one written last first.

    A damaged one stands first if its step is beyond those of all others, else last.
    """
    saved = [_look(directory / name) for name in _names(directory)]
    good = sorted((s for s in saved if s.place), key=lambda s: s.place.serial if s.place else 0, reverse=True)
    last_step = max((s.step for s in good), default=-1)
    damaged = sorted((s for s in saved if s.place is None), key=lambda s: s.step, reverse=True)
    return [*(s for s in damaged if s.step > last_step), *good, *(s for s in damaged if s.step <= last_step)]


def find_best(saved: Collection[Saved], metric: str, mode: Mode) -> Saved | None:
    """Return the checkpoint whose metric is best, of equal ones the newest; None if none has it.

    Args:
        saved: As `list_saved` returned them.
        metric: Its name.
        mode: Which values are better.
    """
    return next(iter(_best_first(saved, metric, mode)), None)


def next_place(directory: Path, step: int, metrics: Mapping[str, float], num_nonfinite: int = 0) -> Place:
    """Make the record of the checkpoint that is written next."""
    serials = [saved.place.serial for saved in list_saved(directory) if saved.place]
    serial = max(serials, default=0) + 1
    return Place(step=step, serial=serial, metrics=dict(metrics), num_nonfinite=num_nonfinite)


def rotate(directory: Path, keep: int, keep_best: Mapping[str, Mode], verdicts: Verdicts) -> None:
    """Remove all but the newest whole checkpoints and the best ones; what only has the name of one stays.

    Of those whose models have the fewest tensors with values that are not finite, the newest stays as well. A
    checkpoint with altered bytes doesn't count, and stays until enough whole ones are newer.

    Args:
        directory: Of the run; nothing else may be saving there.
        keep: How many of the newest stay.
        keep_best: Metrics whose best checkpoint stays too.
        verdicts: Which checkpoints are whole.
    """
    saved = list_saved(directory)
    good = [s for s in saved if s.place]
    if len(saved) <= keep and len(good) == len(saved):  # nothing to remove, and no need to read
        return
    stay = _until_whole(good, keep, verdicts)
    stay |= _until_whole(sorted(good, key=lambda s: s.place.num_nonfinite if s.place else 0), 1, verdicts)
    for metric, mode in keep_best.items():
        stay |= _until_whole(_best_first(good, metric, mode), 1, verdicts)
    for old in saved:
        if old.path not in stay and is_ours(old.path):
            remove_directory(old.path)
            verdicts.forget(old.path)


@contextmanager
def sole_saver(directory: Path) -> Iterator[None]:
    """Keep other savers out of a run's directory, made if it isn't there, and clear what killed ones have left.

    Raises:
        CheckpointForeignError: it is a checkpoint itself.
        CheckpointBusyError: another saver is in it.
        CheckpointError: it can't be written to, at any time in the block.
    """
    if (directory / MANIFEST_FILE).exists():
        raise CheckpointForeignError(
            f"save: a CheckpointManager's directory must not be a checkpoint itself, got {directory}. "
            f"Choose another one, for instance {directory.with_name(directory.name + '-run')}."
        )
    with must_be_writable(directory, "save", "a writable directory"):
        directory.mkdir(parents=True, exist_ok=True)
        with hold_lock(directory / ".lock") as is_alone:
            if is_alone:
                remove_leftovers(directory, _NAME)
            yield


def _best_first(saved: Collection[Saved], metric: str, mode: Mode) -> list[Saved]:
    having = [(s, s.place.metrics[metric]) for s in saved if s.place and metric in s.place.metrics]
    return [s for s, value in sorted(having, key=lambda pair: pair[1] if mode == "min" else -pair[1])]


def _until_whole(saved: Iterable[Saved], num_whole: int, verdicts: Verdicts) -> set[Path]:
    """Take checkpoints in their order until so many of them are whole."""
    taken: set[Path] = set()
    for one in saved:
        if num_whole == 0:
            break
        taken.add(one.path)
        num_whole -= verdicts.is_whole(one.path)
    return taken


def _names(directory: Path) -> set[str]:
    if not directory.is_dir():
        return set()
    matches = [_NAME.fullmatch(entry.name) for entry in directory.iterdir()]
    # A leftover that leads elsewhere is none of a saver's.
    left = [_LEFT_NAME.fullmatch(entry.name) for entry in directory.iterdir() if is_real_directory(entry)]
    return {match[0] for match in matches if match} | {match[1] for match in left if match}


def is_ours(path: Path) -> bool:
    """Tell a checkpoint, whole or damaged, from what others call so too: DCP directories, files, links to elsewhere."""
    return is_native(path) and not path.is_symlink()


def _look(path: Path) -> Saved:
    step = int(path.name.removeprefix("step-"))
    try:
        place = read_manifest(path if path.exists() else find_replaced(path) or path).place
    except CheckpointError:
        place = None
    return Saved(path=path, step=step, place=place)


def _agrees(path: Path) -> bool:
    try:
        check_files(path, read_manifest(path))
    except CheckpointError:
        return False
    return True


def _stamp(path: Path) -> _Stamp:
    try:
        with os.scandir(path) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return frozenset()
    return frozenset((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
