"""Runs of one way to train and save, ended by one fault after another, and what is checked after each."""

import contextlib
import json
import os
import random
import shutil
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.fault_soak.kinds import CONT, GIVEN_UP_S, TERM, TWO, USR1, Fault, draw_plan, kinds, read_plan
from benchmarks.fault_soak.processes import SHARED, Child, Starter
from benchmarks.fault_soak.task import digest_of
from benchmarks.fault_soak.ways import LOOPS, WAYS, Setup, read_newest
from tests.faults.inject import files_of

from everygpu.checkpoint.verify import examine

LONGEST_RUN_S = 30.0
_ENDS_WITHOUT_US = (-TERM, -USR1)
CLASSES = ("corrupt or lost", "wrong step", "different losses", "leaks", "hung", "wrong end")


@dataclass(slots=True, kw_only=True)
class Log:
    """What a run has told."""

    losses: dict[int, str] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    """Lines that differ from another run's of the same step."""
    done: list[Fault] = field(default_factory=list)
    resumed: list[tuple[int, str]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    """Steps at which a save has begun."""
    returned: list[int] = field(default_factory=list)
    """Those that have returned."""
    caught: list[str] = field(default_factory=list)
    raised: str | None = None
    message: str = ""
    between: list[tuple[int, int, int, list[str]]] = field(default_factory=list)
    forks: dict[int, int] = field(default_factory=dict)
    last_step: int = 0
    has_finished: bool = False

    def announced(self, *, asynchronous: bool, is_orderly: bool) -> int:
        """Return the last step whose checkpoint must be there."""
        sure = self.returned if is_orderly or not asynchronous else self.returned[:-1]
        return max(sure, default=0)


@dataclass(slots=True, kw_only=True)
class Record:
    """One run, its faults and what was wrong."""

    setup: Setup
    number: int
    faults: list[Fault]
    seconds: float = 0.0
    said: Path
    """What it has written to standard error."""
    wrong: list[tuple[str, str]] = field(default_factory=list)

    @property
    def rows(self) -> list[str]:
        """The name of each fault's row: that of its kind, or of two at once."""
        steps = Counter(fault.step for fault in self.faults)
        return [TWO if steps[fault.step] > 1 else fault.kind for fault in self.faults]


Report = Callable[[int, list[Record]], object]
"""Is told how many faults there were, and of the runs of a training."""


class Driver:
    """Trains with faults.

    Args:
        starter: Starts the runs.
        disk: A directory on a disk that may be filled.
        seed: Of the faults.
        is_quick: Whether runs end before their modules do.
    """

    def __init__(self, starter: Starter, disk: Path, seed: int, *, is_quick: bool = False) -> None:
        self._starter, self._disk, self._seed, self._is_quick = starter, disk, seed, is_quick
        self._references: dict[tuple[Any, ...], Log] = {}
        self.records: list[Record] = []
        self._num_runs = 0

    def put(self, way: str, engine: str, num_faults: int, report: Report, only: Sequence[str] = ()) -> None:
        """Put so many faults on one way, of some kinds only where they are named."""
        done = chain = 0
        while done < num_faults:
            chance = random.Random(f"{self._seed} {way} {engine} {chain}")
            setup, plan = _draw_setup(chance, way, engine), draw_plan(chance, engine, only)
            records = self._train(setup, plan, chance)
            done += sum(len(record.faults) for record in records)
            chain += 1
            report(done, records)
        self._await_all()

    def put_plan(self, setup: Setup, text: str, report: Report) -> None:
        """Put the faults of a plan on one training."""
        chance = random.Random(self._seed)
        records = self._train(setup, read_plan(text, chance), chance)
        report(sum(len(record.faults) for record in records), records)
        self._await_all()

    def _train(self, setup: Setup, plan: list[Fault], chance: random.Random) -> list[Record]:
        """Train to the last step, beginning again after each fault that ends the run."""
        root = self._disk / "run"
        _clear(root)
        reference = self._reference(setup)
        records: list[Record] = []
        expected: tuple[int, str] | None = None
        for _ in range(3 * len(plan) + 3):
            log, child, record = self._run(setup, plan, root)
            if wrong := _resumed_wrongly(log, expected, reference):
                # That is the last fault's doing. What follows from it isn't counted again: the training begins anew.
                records[-1].wrong += wrong
                expected = _clear(root)
                continue
            records.append(record)
            self._compare(log, reference, record)
            done = {fault.number for fault in log.done}
            plan = [fault for fault in plan if fault.number not in done]
            expected = self._look(setup, root, log, child, record, chance)
            for left in self._starter.overdue():
                left.run.wrong.append(("leaks", f"{left.what} (pid {left.pid}) goes on"))
            if log.has_finished:
                break
        self._keep(records)
        return records

    def _keep(self, records: list[Record]) -> None:
        """Count what an undisturbed end of a training shows with the last fault."""
        for earlier, later in pairwise(records):
            if not later.faults:
                earlier.wrong += later.wrong
        self.records += [record for record in records if record.faults]

    def _reference(self, setup: Setup) -> Log:
        """Train once without faults, for each way that the numbers depend on."""
        key = (*setup.reference, setup.asynchronous)
        if key not in self._references:
            root = self._disk / "reference"
            root.mkdir()
            log, child, _ = self._run(setup, [], root, digests=True)
            if child.code != 0:
                raise RuntimeError(f"a run of {setup} without faults ended with {child.code}: {child.said.read_text()}")
            shutil.rmtree(root)
            self._references[key] = log
        return self._references[key]

    def _run(self, setup: Setup, plan: list[Fault], root: Path, *, digests: bool = False) -> tuple[Log, Child, Record]:
        """Run once, sending the signals of the faults that it comes to."""
        self._num_runs += 1
        said = self._disk.parent / f"said-{self._num_runs}"
        options = {
            "setup": asdict(setup),
            "plan": [fault.as_json() for fault in plan],
            "root": str(root),
            "seed": self._num_runs,
            "digests": digests,
            "is_quick": self._is_quick,
        }
        child, log = self._starter.start(options, said), Log()
        record = Record(setup=setup, number=self._num_runs, faults=log.done, said=said)
        begin = time.monotonic()
        pending: list[tuple[float, int, int]] = []
        deadline = time.monotonic() + LONGEST_RUN_S
        while not self._starter.has_ended(child):
            for line in child.read_lines(0.002):
                pending += _take_in(line, log, child, plan)
            pending = _send_due(pending)
            if time.monotonic() > deadline:
                record.wrong.append(("hung", f"after {log.last_step} steps"))
                os.kill(child.pid, signal.SIGKILL)
                deadline += LONGEST_RUN_S
        while lines := child.read_lines():
            for line in lines:
                _take_in(line, log, child, plan)
        os.close(child.told)
        for _, number, pid in pending:
            if number == CONT:
                _send(pid, CONT)
        if child.code == -signal.SIGKILL:
            for pid in child.names:
                _send(pid, CONT)  # what stopped it lets it go: only then can it end
        record.seconds = time.monotonic() - begin
        self._starter.adopt(child, record)
        (self._disk / "fill").unlink(missing_ok=True)
        return log, child, record

    def _compare(self, log: Log, reference: Log, record: Record) -> None:
        """Compare what a run has done with what one without faults does."""
        wrong = [step for step, loss in log.losses.items() if reference.losses.get(step) != loss]
        if wrong:
            record.wrong.append(("different losses", f"from step {min(wrong)}"))
        record.wrong += log.wrong
        for step, digest in log.resumed[1:]:
            if step and digest != reference.digests[step]:
                record.wrong.append(("corrupt or lost", f"resumed at {step} with other contents"))
        most = [max(counts) for counts in list(zip(*reference.between))[:3]]
        for *counts, threads in log.between:
            for name, found, limit in zip(("threads", "files", "children"), counts, most):
                if found > limit:
                    what = f"{found} {name} between two passes, not {limit}; threads {threads}"
                    record.wrong.append(("leaks", what))
        for number, code in log.forks.items():
            if code not in (0, -signal.SIGTERM):
                record.wrong.append(("wrong end", f"fork {number} ended with {code}"))

    def _look(
        self, setup: Setup, root: Path, log: Log, child: Child, record: Record, chance: random.Random
    ) -> tuple[int, str] | None:  # fmt: skip
        """Check how a run has ended and what is on the disk; return what the next one must resume from."""
        _check_end(setup, log, child, record)
        is_full = any("fills" in kinds()[fault.kind].options for fault in log.done)
        is_orderly = child.code in (0, 1, 143) and not is_full and log.raised != "CheckpointError"
        least = log.announced(asynchronous=setup.asynchronous, is_orderly=is_orderly)
        if log.resumed:
            least = max(least, log.resumed[0][0])
        most = max([*log.begun, *(step for step, _ in log.resumed)], default=0)
        if child.code == 143:
            least = log.last_step
        found = self._read(setup, root, record)
        if found is not None and not least <= found[0] <= most:
            what = "corrupt or lost" if found[0] == 0 else "wrong step"
            record.wrong.append((what, f"newest is {found[0]}, not between {least} and {most}"))
        damages = [damage for fault in log.done if (damage := kinds()[fault.kind].damage)]
        if found is not None and found[0] and damages and not log.has_finished:
            found = _damage(setup, root, partial(damages[0], chance=chance), found)
        if found is None:
            _clear(root)
        return found

    def _read(self, setup: Setup, root: Path, record: Record) -> tuple[int, str] | None:
        """Load the newest checkpoint, and verify it where that can be done; None where it is lost."""
        reference = self._reference(setup)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error" if setup.way == "everygpu" else "ignore")
                newest = read_newest(setup.way, root)
        except Exception as error:  # noqa: BLE001 - whatever a saver fails with
            record.wrong.append(("corrupt or lost", f"{type(error).__name__}: {error}"[:200]))
            return None
        if newest is None:
            return 0, ""
        step, *states = newest
        found = digest_of(*states)
        if found != reference.digests.get(step):
            record.wrong.append(("corrupt or lost", f"contents of step {step} differ"))
            return None
        if setup.way == "everygpu":
            for saved in sorted(root.glob("step-*")):
                for fault in examine(saved).faults:
                    record.wrong.append(("corrupt or lost", f"{saved.name}/{fault.file} {fault.problem}"))
        return step, found

    def _await_all(self) -> None:
        """Wait for what has outlived its run; look at what is left in shared memory."""
        while self._starter.left:
            for left in self._starter.overdue():
                left.run.wrong.append(("leaks", f"{left.what} (pid {left.pid}) goes on"))
            time.sleep(0.05)
        for path in SHARED.iterdir() if os.path.ismount(SHARED) and self.records else ():
            self.records[-1].wrong.append(("leaks", f"{path} is left"))
            with contextlib.suppress(OSError):
                path.unlink()


def _clear(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()


def _damage(setup: Setup, root: Path, damage: Callable[[Path], None], newest: tuple[int, str]) -> tuple[int, str]:
    """Damage the newest checkpoint; return what is the newest one then. The last one that there is stays whole."""
    older = sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))[:-1]
    if setup.way == "everygpu" and not older:
        return newest
    names = {"everygpu": "step-{:08d}", "torch": "checkpoint.pt", "dcp": "{:08d}", "lightning": "{:08d}.ckpt"}
    files = files_of(root / names[setup.way].format(newest[0]))
    damage(files[newest[0] % len(files)])
    return (older[-1], "") if setup.way == "everygpu" else newest


def _resumed_wrongly(log: Log, expected: tuple[int, str] | None, reference: Log) -> list[tuple[str, str]]:
    """Say what is wrong with a run's beginning, where there was a run before it."""
    if expected is None:
        return []
    if not log.resumed:
        return [("corrupt or lost", f"not resumed: {log.raised}: {log.message}")]
    (step, digest), wrong = log.resumed[0], []
    if step != expected[0]:
        wrong.append(("wrong step", f"resumed at {step}, not at {expected[0]}"))
    if step and digest != reference.digests[step]:
        wrong.append(("corrupt or lost", f"resumed at {step} with other contents"))
    return wrong


def _draw_setup(chance: random.Random, way: str, engine: str) -> Setup:
    return Setup(
        way=way,
        engine=engine,
        loop=chance.choice(LOOPS) if way == "everygpu" else "plain",
        asynchronous=WAYS[way].is_asynchronous and chance.random() < 0.5,
        goes_on=chance.random() < 0.5,
        in_block=chance.random() < 0.5,
        saves_feeder=chance.random() < 0.5,
    )


def _take_in(line: str, log: Log, child: Child, plan: list[Fault]) -> list[tuple[float, int, int]]:
    """Take note of a line; return the signals that it asks for: when, which, and for which process."""
    word, *rest = line.split(" ")
    if word == "begun":
        child.names[int(rest[1])] = "the server of helpers"
    elif word == "resumed":
        log.resumed.append((int(rest[0]), rest[1]))
    elif word == "step":
        step = log.last_step = int(rest[0])
        if log.losses.setdefault(step, rest[1]) != rest[1]:
            log.wrong.append(("different losses", f"step {step} twice"))
        log.digests[step] = rest[2]
    elif word == "saves":
        log.begun.append(int(rest[0]))
    elif word == "not":  # due
        log.begun.pop()
    elif word == "returned":
        log.returned.append(int(rest[0]))
    elif word == "caught":
        log.caught.append(rest[0])
    elif word == "raised":
        log.raised, log.message = rest[0], " ".join(rest[1:])
    elif word == "between":
        log.between.append((*map(int, rest[:3]), rest[3:]))
    elif word == "fork":
        log.forks[int(rest[0])] = int(rest[1])
    elif word == "saved":
        log.has_finished = True
    elif word == "fault":
        fault = next(fault for fault in plan if fault.number == int(rest[0]))
        log.done.append(fault)
        return _signals_of(fault, child, json.loads(" ".join(rest[1:])))
    return []


def _signals_of(fault: Fault, child: Child, found: dict[str, Any]) -> list[tuple[float, int, int]]:
    kind, when = kinds()[fault.kind], time.monotonic()
    for name in ("worker", "helper"):
        child.names.update(dict.fromkeys(found[name], f"a {name}"))
    pids = {"main": [child.pid]}.get(kind.target) or found[kind.target]
    if found["itself"] or not pids:
        return []
    pid, signals = pids[-1 if kind.target == "helper" else int(fault.chance * len(pids))], []
    for after_s, number in fault.signals:
        when += after_s
        signals.append((when, number, pid))
    if kind.options.get("gives up"):
        signals.append((when + GIVEN_UP_S, signal.SIGKILL, child.pid))
    return signals


def _send_due(pending: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """Send the signals whose time has come; return the others."""
    now = time.monotonic()
    for when, number, pid in pending:
        if when <= now:
            _send(pid, number)
    return [one for one in pending if one[0] > now]


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _check_end(setup: Setup, log: Log, child: Child, record: Record) -> None:
    """Check that a run has ended as one of its faults, or without them, makes it end."""
    if record.wrong and record.wrong[-1][0] == "hung":
        return
    allowed = [kinds()[fault.kind] for fault in log.done]
    for raised in log.caught:
        if setup.way == "everygpu" and not any(raised in kind.errors for kind in allowed):
            record.wrong.append(("wrong end", f"caught {raised}"))
    allowed_now = _ENDS_WITHOUT_US if _is_before_a_save(setup, log) else ()
    is_right = child.code in allowed_now or any(
        kind.is_right(child.code or 0, log.raised, setup.way) for kind in allowed
    )
    if not is_right and not (child.code == 0 and log.has_finished):
        record.wrong.append(("wrong end", f"ended with {child.code}, {log.raised}: {log.message}"))


def _is_before_a_save(setup: Setup, log: Log) -> bool:
    """Tell whether signals did what they do without a CheckpointManager, as its documents say."""
    return not setup.in_block and log.last_step <= (log.resumed[0][0] if log.resumed else 0) + 1


def count_wrong(records: list[Record]) -> Counter[str]:
    """Count the runs in which something of each class was wrong."""
    return Counter(name for record in records for name in {name for name, _ in record.wrong})
