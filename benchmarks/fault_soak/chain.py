"""One training to its last step, in as many runs as its faults make of it, and what is checked between them."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.fault_soak import checks
from benchmarks.fault_soak.checks import Record
from benchmarks.fault_soak.kinds import Fault, kinds
from benchmarks.fault_soak.log import Log
from benchmarks.fault_soak.setup import Setup
from tests.faults.inject import files_of

_NEWEST = {"everygpu": "step-{:08d}", "torch": "checkpoint.pt", "dcp": "{:08d}", "lightning": "{:08d}.ckpt"}


class Chain:
    """Takes in what each run has done, and knows what the next one must find.

    Args:
        setup: Of the training.
        plan: Its faults.
        root: Where it saves.
        reference: A run without faults.
        chance: Chooses what is damaged.
    """

    def __init__(self, setup: Setup, plan: list[Fault], root: Path, reference: Log, chance: random.Random) -> None:
        self.setup, self.plan, self.root = setup, plan, root
        self._reference, self._chance = reference, chance
        self.records: list[Record] = []
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._expected: int | None = None
        """The step that the next run must resume from."""
        self._left: checks.Left = set()
        """What is in the directory besides checkpoints."""
        self._damaged: tuple[Path, Path, int] | None = None
        """A checkpoint, and its file that was damaged, with the time at which that was written."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()

    def take_in(self, log: Log, record: Record) -> bool:
        """Check what a run has done, and what is on the disk; tell whether the training has come to its end."""
        if wrong := checks.check_beginning(log, self._expected, self._reference):
            # That is the last fault's doing. What follows from it isn't counted again: the training begins anew.
            self.records[-1].wrong += [(name, f"{what} (run {record.number})") for name, what in wrong]
            self._begin_anew()
            return False
        self.records.append(record)
        done = {fault.number for fault in log.done}
        self.plan = [fault for fault in self.plan if fault.number not in done]
        record.wrong += checks.check_numbers(log, self._reference)
        record.wrong += checks.check_end(self.setup, log, record.code) if not record.wrong else []
        self._look(log, record)
        return log.has_finished and record.code == 0

    def _look(self, log: Log, record: Record) -> None:
        """Look at what is on the disk; damage it, where that is the fault."""
        if self._damaged and not _is_as_damaged(*self._damaged[1:]):
            self._damaged = None
        left = checks.leftovers(self.setup, self.root)
        wrong = checks.check_leftovers(self.setup, log, record.code, self._left, left)
        named = {name for name, _ in wrong}
        self._left = {one for one in left if one[0] not in named}
        record.wrong += [("leaks", f"{name} {what}") for name, what in wrong]
        damaged = self._damaged[0] if self._damaged else None
        step, unreadable = checks.read_whole(self.setup, self.root, self._reference, damaged)
        record.wrong += unreadable
        if step is None:
            self._begin_anew()
            return
        record.wrong += checks.check_step(self.setup, log, record.code, step)
        self._expected = step
        damages = [damage for fault in log.done if (damage := kinds()[fault.kind].damage)]
        if step and damages and not log.has_finished:
            self._damage(damages[0], step)

    def _damage(self, damage: Callable[[Path, random.Random], None], newest: int) -> None:
        """Damage the newest checkpoint; of everygpu's the last one that there is stays whole."""
        path = self.root / _NEWEST[self.setup.way].format(newest)
        older = [int(other.name.removeprefix("step-")) for other in self.root.glob("step-*") if other != path]
        if self._damaged or (self.setup.way == "everygpu" and not older):
            return
        file = self._chance.choice(files_of(path))
        damage(file, self._chance)
        self._damaged = (path, file, file.stat().st_mtime_ns)
        if self.setup.way == "everygpu":
            self._expected = max(older)

    def finish(self) -> list[Record]:
        """Return the runs that had faults; what one without them has shown is counted with the run before it."""
        for i, record in enumerate(self.records[1:], 1):
            if not record.faults:
                self.records[i - 1].wrong += record.wrong
        return [record for record in self.records if record.faults]


def _is_as_damaged(file: Path, time_ns: int) -> bool:
    return file.exists() and file.stat().st_mtime_ns == time_ns
