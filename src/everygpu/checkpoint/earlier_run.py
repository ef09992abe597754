"""Checkpoints of an earlier run in the directory of one that begins anew: moved aside, where rotation leaves them."""

import logging
import os
import time
from functools import cache
from pathlib import Path

from everygpu.checkpoint.directory import sync_path
from everygpu.checkpoint.run_directory import is_ours, list_saved

logger = logging.getLogger("everygpu")


class EarlierRun:
    """What a run's directory held before the run, and whether it still has to be moved at the first save.

    Args:
        directory: Of the run.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._is_clear = False
        self.is_loaded = False
        """Whether the run goes on from it: then its checkpoints are this run's."""

    def make_way(self, step: int) -> None:
        """Set the earlier run's checkpoints aside before the first one of this run takes its place, and say so.

        Args:
            step: Of the checkpoint.
        """
        last = _last_steps().get(self._directory, step)
        if not (self._is_clear or self.is_loaded or last < step):
            _report(self._directory, step, set_aside(self._directory, step))
        self._is_clear = True
        _last_steps()[self._directory] = step


def set_aside(directory: Path, step: int) -> tuple[list[int], Path] | None:
    """Move a run's checkpoints to a subfolder, if one is of the step or beyond: a run that begins there is another one.

    Each is renamed, the newest last: where the process dies, a run that loads finds the newest, or none.

    Args:
        directory: Of the run; nothing else may be saving there.
        step: What is saved next.
    Returns:
        The steps that were moved, and the folder that holds them: the directory of a run itself. None if none was.
    Source:
        ``lightning.pytorch.callbacks.ModelCheckpoint``, which counts up versions of names that are taken.
    """
    saved = [s for s in reversed(list_saved(directory)) if is_ours(s.path)]
    if all(s.step < step for s in saved):
        return None
    folder = _new_folder(directory / time.strftime("before-%Y%m%d-%H%M%S"))
    for s in saved:
        os.rename(s.path, folder / s.path.name)
    sync_path(folder)
    return sorted(s.step for s in saved), folder


def _report(directory: Path, step: int, moved: tuple[list[int], Path] | None) -> None:
    if moved is not None:
        steps, folder = moved
        logger.warning(
            "save: %s held checkpoints of an earlier run, steps %s, while this one has loaded none and begins with "
            "step %d. They are now in %s; this run goes on without them. To resume from them, end this run, and begin "
            "the next one with CheckpointManager(%r).load(…).",
            directory,
            ", ".join(map(str, steps)),
            step,
            folder,
            str(folder),
        )


@cache
def _last_steps() -> dict[Path, int]:
    """Return what this process saved last to each directory: a manager for each save is one run all the same."""
    return {}


def _new_folder(path: Path) -> Path:
    """Make a folder of that name, or of the first that is free with a number at its end."""
    folder, number = path, 1
    while True:
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
            folder = path.with_name(f"{path.name}-{number}")
