"""Speeds of runs: each run writes a small file in the user's runtime folder, which ``everygpu top`` reads.

Nothing goes over a network. A file is of interest only while its run holds the lock beside it, so that what
a killed run leaves behind is recognised, and removed by the next reader.
"""

import json
import logging
import math
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from everygpu.devices.reserve import name_command
from everygpu.folders import read_json, runtime_folder, write_whole
from everygpu.locks import Lock, is_locked, wait_for_lock

logger = logging.getLogger("everygpu")
_FORMAT = 1
_LOCK_S = 1.0  # a reader that happens to probe the lock holds it for less than a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How a run goes, over its last steps."""

    devices: tuple[str, ...]
    """UUIDs of its GPUs as in ``DeviceSample.uuid``, in the order of its replicas; ``"cpu"`` for a CPU replica."""
    num_steps: int
    """Since it began."""
    steps_per_s: float | None = None
    data_wait_pct: float | None = None
    """0 to 100: how much of the time was spent waiting for batches."""
    communication_pct: float | None = None
    """0 to 100: how much of the time gradients and parameters travelled while nothing else ran."""
    slowest_replica: int | None = None
    """Position in ``devices`` of the one the others wait for; None when none stands out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that is going on, as it described itself."""

    pid: int
    command: str
    figures: Figures
    age_s: float
    """Seconds since it last wrote."""
    meets_at: str | None = None
    """Where this process has met the others that train with it; None for one alone."""


class Publisher:
    """Publishes the figures of this process, once a second at most; its file goes when it does.

    Where the folder can't be written, one line in the log says so, and publishing does nothing.
    """

    def __init__(
        self,
        command: str | None = None,
        *,
        meets_at: str | None = None,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to publish.

        Args:
            command: What people know the run by; the script's name when left out.
            meets_at: Where this process has met the others that train with it; their figures are shown as one run's.
            interval_s: Seconds between two writes, at least.
            clock: Seconds, growing.
        """
        self._command = name_command() if command is None else command
        self._meets_at = meets_at
        self._interval_s = interval_s
        self._clock = clock
        self._due_s = clock()
        self._pid = os.getpid()
        self._path = _claim()
        self.close = weakref.finalize(self, _withdraw, self._path, self._pid)

    @property
    def is_due(self) -> bool:
        """Whether ``publish`` would write now: asked first, it saves making the figures at every step."""
        return self._clock() >= self._due_s

    def publish(self, figures: Figures) -> None:
        """Write the figures, if it is time to; a process forked from this one writes nothing."""
        now = self._clock()
        if now < self._due_s or self._path is None or not self.close.alive or self._pid != os.getpid():
            return
        self._due_s = now + self._interval_s
        record = {"format": _FORMAT, "pid": self._pid, "command": self._command, "meets_at": self._meets_at}
        record["written_s"] = time.time()
        try:
            write_whole(self._path[0], json.dumps(record | {"figures": asdict(figures)}))
        except OSError as error:
            logger.warning("Figures are not published any more: %s.", error)
            self.close()


def read_runs() -> list[Run]:
    """Read the figures of all runs of this user that are going on, in the order of their process ids.

    Returns:
        The runs. What dead ones have left is removed.
    """
    try:
        paths = sorted(_folder().glob("*.json"))
    except OSError:
        return []
    runs = [run for path in paths if (run := _read(path)) is not None]
    return sorted(runs, key=lambda run: run.pid)


def _folder() -> Path:
    folder = runtime_folder() / "figures"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _claim() -> tuple[Path, Lock] | None:
    """Find a name of our own, and hold the lock that says we live."""
    try:
        # Containers that share the folder have process ids of their own: a time makes the name the only one.
        path = _folder() / f"{os.getpid()}-{time.time_ns():x}.json"
        lock = wait_for_lock(_lock_of(path), _LOCK_S)
    except OSError as error:
        logger.warning("Figures are not published: %s.", error)
        return None
    return None if lock is None else (path, lock)


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


def _withdraw(claim: tuple[Path, Lock] | None, pid: int) -> None:
    if claim is None or pid != os.getpid():
        return
    path, lock = claim
    _remove(path)
    lock.release()
    _remove(_lock_of(path))


def _remove(path: Path) -> None:
    with suppress(OSError):  # another reader was faster, or Windows has it open
        path.unlink()


def _read(path: Path) -> Run | None:
    try:
        if not is_locked(_lock_of(path)):
            _remove(path)
            _remove(_lock_of(path))
            return None
        return _parse(read_json(path))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _parse(record: Any) -> Run:
    if record["format"] != _FORMAT:
        raise ValueError(record["format"])
    told = {entry.name: record["figures"][entry.name] for entry in fields(Figures)}
    return Run(
        pid=_whole(record["pid"]),
        command=str(record["command"]),
        figures=Figures(
            devices=tuple(map(str, told["devices"])),
            num_steps=_whole(told["num_steps"]),
            steps_per_s=_finite(told["steps_per_s"]),
            data_wait_pct=_finite(told["data_wait_pct"]),
            communication_pct=_finite(told["communication_pct"]),
            slowest_replica=None if told["slowest_replica"] is None else _whole(told["slowest_replica"]),
        ),
        age_s=max(0.0, time.time() - (_finite(record["written_s"]) or 0.0)),
        meets_at=None if record.get("meets_at") is None else str(record["meets_at"]),
    )


def _whole(value: Any) -> int:
    if not isinstance(value, int) or abs(value) >= 2**63:
        raise ValueError(f"figures: a count must be a whole number of 64 bits, got {value!r}")
    return value


def _finite(value: Any) -> float | None:
    """Take a number; None for one that is no figure, such as the infinite speed of a step that took no time."""
    number = None if value is None else float(value)
    return number if number is not None and math.isfinite(number) else None
