"""Runs of one way to train and save, ended by one fault after another."""

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.fault_soak.chain import Chain
from benchmarks.fault_soak.checks import Record
from benchmarks.fault_soak.faults import FILL
from benchmarks.fault_soak.kinds import CONT, Fault, draw_plan, read_plan
from benchmarks.fault_soak.log import Log
from benchmarks.fault_soak.processes import SHARED, Child, Starter
from benchmarks.fault_soak.setup import LOOPS, Setup
from benchmarks.fault_soak.signals import Pending, has_ended_at_once, send, send_due, signals_of
from benchmarks.fault_soak.ways import WAYS

LONGEST_RUN_S = 30.0

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
            setup, plan = _draw_setup(chance, way, engine), draw_plan(chance, only)
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
        chain = Chain(setup, plan, self._disk / "run", self._reference(setup), chance)
        for _ in range(3 * len(plan) + 3):
            if chain.take_in(*self._run(setup, chain.plan, chain.root)):
                break
            self._note_overdue()
        self.records += chain.finish()
        return chain.records

    def _reference(self, setup: Setup) -> Log:
        """Train once without faults, for each way that the numbers depend on."""
        key = (*setup.reference, setup.asynchronous)
        if key not in self._references:
            root = self._disk / "reference"
            root.mkdir()
            log, record = self._run(setup, [], root, digests=True)
            if record.code != 0:
                said = record.said.read_text()
                raise RuntimeError(f"a run of {setup} without faults ended with {record.code}: {said}")
            shutil.rmtree(root)
            self._references[key] = log
        return self._references[key]

    def _run(self, setup: Setup, plan: list[Fault], root: Path, *, digests: bool = False) -> tuple[Log, Record]:
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
        pending = self._follow(child, log, plan, record)
        record.raised = log.raised
        record.code, record.seconds = child.code or 0, time.monotonic() - begin
        # What was stopped by a fault that the run hasn't outlived is let go: only then can it end.
        stopped = [pid for _, number, pid in pending if number == CONT]
        for pid in [*stopped, *child.names] if has_ended_at_once(record) else stopped:
            send(pid, CONT)
        self._starter.adopt(child, record)
        (self._disk / FILL).unlink(missing_ok=True)
        if os.path.ismount(SHARED):
            (SHARED / FILL).unlink(missing_ok=True)
        return log, record

    def _follow(self, child: Child, log: Log, plan: list[Fault], record: Record) -> Pending:
        """Read what a run tells until it has ended; return the signals that were still to be sent."""
        pending: Pending = []
        deadline = time.monotonic() + LONGEST_RUN_S
        while not self._starter.has_ended(child):
            for line in child.read_lines(0.002):
                fault = log.take_in(line, plan)
                pending += signals_of(fault[0], child, fault[1]) if fault else []
            pending = send_due(pending)
            if time.monotonic() > deadline:
                record.wrong.append(("hung", f"after {log.last_step} steps"))
                os.kill(child.pid, signal.SIGKILL)
                deadline += LONGEST_RUN_S
        while lines := child.read_lines():
            for line in lines:
                log.take_in(line, plan)
        os.close(child.told)
        return pending

    def _note_overdue(self) -> None:
        """Note what has outlived its run for too long."""
        for left in self._starter.overdue():
            left.run.wrong.append(("leaks", f"{left.what} (pid {left.pid}) goes on"))

    def _await_all(self) -> None:
        """Wait for what has outlived its run; look at what is left in shared memory."""
        while self._starter.left:
            self._note_overdue()
            time.sleep(0.05)
        for path in SHARED.iterdir() if os.path.ismount(SHARED) and self.records else ():
            self.records[-1].wrong.append(("leaks", f"{path} of {path.stat().st_size} bytes is left"))
            with contextlib.suppress(OSError):
                path.unlink()


def _draw_setup(chance: random.Random, way: str, engine: str) -> Setup:
    return Setup(
        way=way,
        engine=engine,
        loop=chance.choice(LOOPS) if way == "everygpu" else "plain",
        asynchronous=WAYS[way].is_asynchronous and chance.random() < 0.5,
        goes_on=chance.random() < 0.5,
        in_block=chance.random() < 0.5,
    )
