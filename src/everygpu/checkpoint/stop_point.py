"""Which call of a manager's save ends the run after a signal: the next one, or the same one on all ranks."""

import logging
import threading
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

from everygpu.checkpoint.stop_signals import check_signals, stop_signals
from everygpu.exit_codes import STOPPED
from everygpu.ranks.group import Group, joined

logger = logging.getLogger("everygpu")

_ASKED = "a signal asks the run to end"


class StopPoint:
    """Counts the calls of a manager's save, and ends the run after one of them.

    Under ranks rank 0 decides. In the first call after a signal it leaves a note that the next call is the last one.
    Between the two lies a step, in which all ranks exchange gradients: each finds the note there.

    Args:
        name: Of the manager, the same on all ranks.
        signals: As the manager takes them.
    """

    def __init__(self, name: str, signals: Collection[int] | None) -> None:
        self._signals = check_signals(signals)
        self._key = f"last save to {name}"
        self._num_calls = 0
        self._last: int | None = None
        self._has_asked = False

    def listen(self, manager: object) -> None:
        """Hear signals from now on, for as long as the manager is in use."""
        if self._signals:
            stop_signals().listen(manager, self._signals)

    def is_here(self) -> bool:
        """Tell at the next call whether it is the last one."""
        self._num_calls += 1
        if not self._signals:
            return False
        group = joined()
        if group is None:
            return stop_signals().heard is not None
        if self._last is None:
            self._last = self._decide(group) if group.rank == 0 else self._learn(group)
        is_last = self._last is not None and self._num_calls >= self._last
        # Rank 0 writes, and can be ended meanwhile, which ends all. The others only wait for it.
        stop_signals().is_ending = is_last and group.rank != 0
        return is_last

    def end(self, path: Path) -> NoReturn:
        """End the run: its checkpoint is written."""
        stop_signals().is_ending = True
        logger.warning("%s is saved: the run ends with exit code %d, as a signal asks.", path, STOPPED)
        raise SystemExit(STOPPED)

    def leave(self, manager: object, *, has_failed: bool) -> None:
        """Hear nothing more for a manager; a signal that came after its last save acts now as it would without us."""
        missed = stop_signals().leave(manager)
        is_ours = threading.current_thread() is threading.main_thread() and joined() is None
        if missed is not None and is_ours and not has_failed:
            stop_signals().act(missed)

    def _decide(self, group: Group) -> int | None:
        if stop_signals().heard is None and group.find_note(_ASKED) is None:
            return None
        group.leave_note(self._key, str(self._num_calls + 1))
        return self._num_calls + 1

    def _learn(self, group: Group) -> int | None:
        """Find what rank 0 has decided; ask it to, where the signal came here."""
        note = group.find_note(self._key)
        if note is None and stop_signals().heard is not None and not self._has_asked:
            self._has_asked = True
            group.leave_note(_ASKED, "")
        return None if note is None else int(note)
