"""Whether the metrics of a run's saves are those by which its best checkpoints are kept."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everygpu.checkpoint.manager_arguments import finite_numbers
from everygpu.checkpoint.run_directory import Mode
from everygpu.errors import OptionError

logger = logging.getLogger("everygpu")

_NUM_SAVES = 5
"""After so many saves without a metric of ``keep_best`` a warning says so."""


class KeptMetrics:
    """Takes the metrics of each save, and notices a name that ``keep_best`` has otherwise.

    Args:
        keep_best: As the manager takes it.
        directory: Of the run, for the warning.
    """

    def __init__(self, keep_best: Mapping[str, Mode], directory: Path) -> None:
        self._keep_best = keep_best
        self._directory = directory
        self._num_without: int | None = 0 if keep_best else None

    def take(self, metrics: Mapping[str, Any] | None, *, is_resumed: bool) -> dict[str, float]:
        """Return the metrics that are finite.

        A metric may be computed at some saves only, so one of another name alone is an error only as long as this
        run, or one that it goes on from, can't have had the right one.

        Args:
            metrics: As `CheckpointManager.save` takes them.
            is_resumed: Whether the run goes on from another one.
        Raises:
            OptionError: they are no dict; one is no number; or all have names that ``keep_best`` doesn't.
        """
        numbers = finite_numbers({} if metrics is None else metrics)
        if self._num_without is None or (metrics and self._keep_best.keys() & metrics.keys()):
            self._num_without = None
            return numbers
        names = ", ".join(map(repr, self._keep_best))
        if metrics and not is_resumed:
            raise OptionError(
                f"save: metrics must have one of keep_best, {names}, got {', '.join(map(repr, metrics))}. "
                f"Give both the same name, or, where it is not computed yet, leave metrics out."
            )
        self._num_without += 1
        if self._num_without == _NUM_SAVES:
            logger.warning(
                "save: %d saves to %s had no metric of keep_best, %s, so no best checkpoint is kept. "
                "Pass metrics={%r: …} to save.",
                _NUM_SAVES,
                self._directory,
                names,
                next(iter(self._keep_best)),
            )
        return numbers
