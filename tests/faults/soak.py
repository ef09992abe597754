"""Faults at random moments of a training: what is whole, what is left, and whether resumed runs compute the same.

    python -m tests.faults.soak                       # 1,000 faults
    python -m tests.faults.soak --faults 100 --seed 7
    python -m tests.faults.soak --plan "kill -9@7,SIGTERM@9"

Trains on two CPU replicas, with a Feeder, two workers and a CheckpointManager; a run that a fault has ended resumes.
Says, and ends with status 1, if a checkpoint is lost, a run resumes with other numbers, leaves something behind, hangs,
or ends otherwise than its faults make it end. Files that are cut off or altered: test_damage.py. Linux only.
"""

import argparse
import contextlib
import ctypes
import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import everygpu
from everygpu.checkpoint.verify import examine
from tests.faults.inject import die_at

LAST_STEP, BATCH_SIZE, NUM_ROWS, SAVE_EVERY, KEEP = 60, 64, 640, 3, 2
DATA_TIMEOUT_S, LONGEST_RUN_S, ORPHANS_END_WITHIN_S = 20.0, 600.0, 120.0
"""Last resorts, for a machine that is busy with other work, too."""
PHASES = ("data", "forward", "backward", "update", "save")
KILL, STOP, CONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
GOES_ON = 0

# The faults.


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault."""

    ends: tuple[int, ...]
    """How the run may end: exit codes or negative signals; ``GOES_ON`` is 0."""
    errors: tuple[str, ...] = ()
    """The exceptions it may raise."""
    signals: tuple[tuple[float, int], ...] = ()
    """Seconds since the one before, at most, and the number."""
    target: str = "main"
    """Who gets them: the main process, a ``worker``, or ``all``."""
    phases: tuple[str, ...] = PHASES
    does: str = ""
    """What the run does to itself."""
    weight: float = 1.0


SOON, PAUSE = 0.012, ((0.012, STOP), (0.3, CONT))
WORKER = ("WorkerError", "RuntimeError")
FULL = ("CheckpointError", "RuntimeError", "OSError")
# A worker that can't send its batch drops it, and only prints why (torch's queue); the Feeder's timeout says the rest.
NO_FILES = (*FULL, "WorkerError", "EOFError", "ConnectionResetError", "FeedTimeoutError")
KINDS = {
    "kill -9": Kind(ends=(-KILL,), signals=((SOON, KILL),), weight=2),
    "kill -9 in a save": Kind(ends=(-KILL,), phases=("save",), does="dies", weight=3),
    "kill -9 of a worker": Kind(ends=(GOES_ON,), errors=WORKER, target="worker", signals=((SOON, KILL),)),
    "main stopped and continued": Kind(ends=(GOES_ON,), signals=PAUSE),
    "worker stopped and continued": Kind(ends=(GOES_ON,), target="worker", signals=PAUSE),
    "worker stopped for good": Kind(ends=(GOES_ON,), errors=("FeedTimeoutError", *WORKER), target="worker",
                                    signals=((SOON, STOP),), weight=0.5),
    "SIGTERM": Kind(ends=(143,), signals=((SOON, TERM),)),
    "SIGUSR1": Kind(ends=(143,), signals=((SOON, USR1),)),
    "SIGTERM to all processes": Kind(ends=(143,), errors=("WorkerError",), target="all", signals=((SOON, TERM),)),
    "Ctrl-C": Kind(ends=(-INT,), signals=((SOON, INT),)),
    "Ctrl-C as in a notebook": Kind(ends=(-INT,), errors=("KeyboardInterrupt",), signals=((SOON, INT),), does="caught"),
    "Ctrl-C twice": Kind(ends=(-INT,), signals=((SOON, INT), (0.4, INT))),
    "exception in forward": Kind(ends=(), errors=("ValueError",), phases=("forward",), does="forward value"),
    "exception in backward": Kind(ends=(), errors=("ValueError",), phases=("forward",), does="backward value"),
    "exception in a worker": Kind(ends=(GOES_ON,), errors=("ValueError",), phases=("data",), does="worker value"),
    "out of memory in forward": Kind(ends=(), errors=("OutOfMemoryError",), phases=("forward",), does="forward memory"),
    "out of memory in backward": Kind(ends=(), errors=("OutOfMemoryError",), phases=("forward",),
                                      does="backward memory"),
    "full disk": Kind(ends=(GOES_ON,), errors=FULL, phases=("save",), does="full", weight=2),
    "too many open files": Kind(ends=(GOES_ON,), errors=NO_FILES, does="files"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, drawn."""

    number: int
    kind: str
    step: int
    phase: str
    chance: float
    """From 0 to 1: of a moment, a size or a place, as the kind needs it."""
    signals: tuple[tuple[float, int], ...]


def draw_fault(chance: random.Random, kind: str, step: int, number: int) -> Fault:
    return Fault(number=number, kind=kind, step=step, phase=chance.choice(KINDS[kind].phases), chance=chance.random(),
                 signals=tuple((chance.uniform(0, most), n) for most, n in KINDS[kind].signals))  # fmt: skip


def draw_plan(chance: random.Random) -> list[Fault]:
    """Draw the faults of one training, in the order of its steps; some of them are two at once."""
    plan: list[Fault] = []
    step = 2 + chance.randrange(9)
    while step <= LAST_STEP - 8:
        for kind in chance.choices(
            list(KINDS), [kind.weight for kind in KINDS.values()], k=1 + (chance.random() < 0.08)
        ):
            plan.append(draw_fault(chance, kind, step, len(plan)))
        step += 1 + chance.randrange(9)
    return sorted(plan, key=lambda fault: (fault.step, PHASES.index(fault.phase)))


def read_plan(chance: random.Random, text: str) -> list[Fault]:
    """Read kinds and steps; the rest is drawn."""
    pairs = [part.rsplit("@", 1) for part in text.split(",")]
    return [draw_fault(chance, name, int(step), number) for number, (name, step) in enumerate(pairs)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How one training is set up."""

    loop: str = "plain"
    """``plain``, ``TrainStep`` or ``ShardedOptimizer``."""
    asynchronous: bool = False
    goes_on: bool = False
    """The script catches errors, loads the newest checkpoint and goes on."""
    in_block: bool = False
    """The manager is used in a ``with`` block."""


# What is trained.

ERRORS = {"value": ValueError, "memory": torch.OutOfMemoryError}
TOLD = ("nothing", *ERRORS, "slow")
"""What a loader's worker may be told to do at its next sample."""


def fail(error: str) -> None:
    raise ERRORS[error]("told to fail")


class Net(nn.Module):
    """Fails in the replica that has a row, where its attributes say."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10)
        )
        self.place, self.error, self.mark = "", "", 0.0

    def forward(self, x: Tensor) -> Tensor:
        is_failing = bool(self.place) and float(x[0].sum()) == self.mark
        if is_failing and self.place == "forward":
            fail(self.error)
        scores: Tensor = self.body(x)
        if is_failing and scores.requires_grad:
            scores.register_hook(lambda _: fail(self.error))
        return scores


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Rows to train on; a loader's worker does at its next sample what it is told."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(NUM_ROWS, 64, generator=generator)
        self._y = self._x[:, :10].argmax(1)
        self.told = multiprocessing.RawValue("i", 0)

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        told, self.told.value = TOLD[self.told.value], 0
        if told in ERRORS:
            fail(told)
        if told == "slow":
            time.sleep(0.25)
        return self._x[index], self._y[index]


def digest_of(model: nn.Module, optimizer: Any) -> str:
    """Sum up both states: the same for the same bits."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict | list | tuple):
            for item in sorted(value.items(), key=lambda item: str(item[0])) if isinstance(value, dict) else value:
                add(item)
        else:
            found.update(value.detach().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())

    state = optimizer.state_dict()
    add([model.state_dict(), state["state"], state["param_groups"]])
    return found.hexdigest()[:16]


# A run: a training script that tells what it does, and does to itself what it is told.


def children_of(pid: int) -> list[int]:
    """List the processes whose parent a process is, the ended ones too that it hasn't waited for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            if path.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(path.parent.name))
    return found


class Run:
    """One training from the newest checkpoint to the last step; tells what it does at ``told``, line by line."""

    def __init__(self, setup: Setup, plan: list[Fault], root: Path, seed: int, told: int) -> None:
        self._setup, self._plan, self._told, self._pid = setup, list(plan), told, os.getpid()
        self._limits = {which: resource.getrlimit(which) for which in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)}
        self._full_until, self._is_caught, self._batch = LAST_STEP, False, None
        if any(KINDS[fault.kind].does == "caught" for fault in plan):
            sys.ps1 = ">>> "  # there is a prompt, as in a notebook
        everygpu.seed_all(seed if everygpu.CheckpointManager(root).latest() else 0)
        self._net, self._samples = Net(), Samples()
        self._model = everygpu.DataParallel(self._net, ["cpu"] * 2, engine="threads")
        self._optimizer: Any = torch.optim.AdamW(self._model.parameters(), lr=3e-3)
        self._scheduler = torch.optim.lr_scheduler.ExponentialLR(self._optimizer, gamma=0.99)
        if setup.loop == "ShardedOptimizer":
            self._optimizer = everygpu.ShardedOptimizer(self._optimizer, ["cpu"] * 2)
        self._step = everygpu.TrainStep(self._model, F.cross_entropy, self._optimizer) if "Step" in setup.loop else None
        loader = DataLoader(self._samples, BATCH_SIZE, shuffle=True, num_workers=2, multiprocessing_context="fork")
        self._feeder = everygpu.Feeder(loader, self._model, timeout=DATA_TIMEOUT_S)
        kept = {"model": self._model, "optimizer": self._optimizer, "scheduler": self._scheduler, "data": self._feeder}
        options = {"keep": KEEP, "every": SAVE_EVERY, "asynchronous": setup.asynchronous}
        self._checkpoints = everygpu.CheckpointManager(root, **options, **kept)

    def tell(self, *words: Any) -> None:
        if os.getpid() == self._pid:
            os.write(self._told, (json.dumps(words) + "\n").encode())

    def go(self) -> None:
        manager = self._checkpoints
        with manager if self._setup.in_block else contextlib.nullcontext():
            step = self._resume()
            while step < LAST_STEP:
                try:
                    step = self._train(step)
                except (Exception, KeyboardInterrupt) as error:
                    is_caught = isinstance(error, Exception) or self._is_caught
                    if not (is_caught and self._setup.goes_on and self._batch is not None and manager.latest()):
                        raise
                    self.report("caught", type(error).__name__)
                    step = None
                if step is None:  # without the error, whose traceback holds the pass
                    step = self._recover()
            self._make_room()
            if self._setup.in_block:  # others leave the last save to the interpreter's end
                manager.close()
            self.report("finished")

    def _resume(self) -> int:
        step = self._checkpoints.resume()
        self.report("resumed", step, digest_of(self._net, self._optimizer) if step else "")
        return step

    def _recover(self) -> int:
        """Go back to the newest checkpoint, as docs/reliability.md says."""
        self._make_room()
        self._net.place, self._batch = "", None
        self._end_pass()
        return self._resume()

    def _train(self, step: int) -> int:
        """Train to the end of the pass, or to the last step."""
        batches = iter(self._feeder)
        while step < LAST_STEP:
            self._at(step + 1, "data")
            self._batch = batch = next(batches, None)
            if batch is None:
                break
            step += 1
            loss = self._train_on(step, *batch)
            self.report("step", step, float(loss).hex(), digest_of(self._net, self._optimizer))
            self._at(step, "save")
            self.report("begun", step)
            self.report("returned" if self._checkpoints.save(step) is not None else "not due", step)
        self._batch = batch = batches = None  # they hold memory that workers share
        self._end_pass()
        return step

    def _train_on(self, step: int, x: Tensor, y: Tensor) -> Tensor:
        self._at(step, "forward")
        if self._step is not None:
            loss = self._step(x, y)
            self._at(step, "backward")
            self._at(step, "update")
        else:
            loss = F.cross_entropy(self._model(x), y)
            self._at(step, "backward")
            self._optimizer.zero_grad()
            loss.backward()
            self._at(step, "update")
            self._optimizer.step()
        self._scheduler.step()
        return loss.detach()

    def _end_pass(self) -> None:
        """End the workers, and tell how many threads, files and children there are."""
        self._feeder.close()
        with contextlib.suppress(everygpu.EveryGPUError):  # a save in the background may have met a fault, too
            self._checkpoints.wait()
        torch.ones((), requires_grad=True).backward()  # torch's engine keeps nodes of a failed one until the next
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "QueueFeederThread":  # of a loader's queue, which is closed: it ends by itself
                thread.join(2.0)
        names = sorted(thread.name for thread in threading.enumerate())
        self.report("between", len(names), len(os.listdir("/proc/self/fd")), len(children_of(self._pid)), names)

    def _at(self, step: int, phase: str) -> None:
        """Do what is to be done at a place of a step."""
        if step >= self._full_until:
            self._make_room()
        while self._plan and self._plan[0].step < step:
            self._plan.pop(0)
        while self._plan and (self._plan[0].step, self._plan[0].phase) == (step, phase):
            self._do(self._plan.pop(0))

    def _do(self, fault: Fault) -> None:
        kind = KINDS[fault.kind]
        self.report("fault", fault.number, [child.pid for child in multiprocessing.active_children()])
        what, _, how = kind.does.partition(" ")
        self._is_caught = what == "caught"
        if what == "dies":
            die_at(1 + int(fault.chance * 60))
        elif what in ("forward", "backward") and self._batch is not None:
            half = -(-len(self._batch[0]) // 2) * (fault.chance < 0.5)
            self._net.mark = float(self._batch[0][half].sum())
            self._net.place, self._net.error = what, how
        elif what == "worker" or (fault.phase == "data" and fault.signals):
            self._samples.told.value = TOLD.index(how or "slow")
        elif what in ("full", "files"):
            used = len(os.listdir("/proc/self/fd"))
            which = resource.RLIMIT_FSIZE if what == "full" else resource.RLIMIT_NOFILE
            most = int(fault.chance * 300_000) if what == "full" else used + int(fault.chance * 8)
            resource.setrlimit(which, (most, self._limits[which][1]))
            self._full_until = fault.step + 4

    def _make_room(self) -> None:
        self._full_until = LAST_STEP
        for which, limits in self._limits.items():
            resource.setrlimit(which, limits)


# The driver: starts runs, sends signals, and checks what has come of them.


@dataclass(slots=True, kw_only=True)
class Log:
    """What a run has told, and how it ended."""

    setup: Setup
    number: int = 0
    plan: list[Fault] = field(default_factory=list)
    losses: dict[int, str] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    resumed: list[tuple[int, str]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    """Steps at which a save has begun."""
    returned: list[int] = field(default_factory=list)
    caught: list[str] = field(default_factory=list)
    raised: str = ""
    between: list[tuple[Any, ...]] = field(default_factory=list)
    last_step: int = 0
    has_finished: bool = False
    code: int = 0
    wrong: list[str] = field(default_factory=list)

    def does(self, *whats: str) -> bool:
        return any(KINDS[fault.kind].does in whats for fault in self.faults)

    def take_in(self, word: str, *rest: Any) -> list[int] | None:
        """Take note of a line; return the workers that there were at a fault."""
        if word == "resumed":
            self._resume(*rest)
        elif word == "step":
            self.last_step, loss, digest = rest
            if self.losses.setdefault(self.last_step, loss) != loss:
                self.wrong.append(f"different losses: step {self.last_step} twice")
            self.digests[self.last_step] = digest
        elif word == "not due":
            self.begun.pop()
        elif word == "finished":
            self.has_finished = True
        elif word == "raised":
            self.raised = rest[0]
        elif word == "fault":
            self.faults.append(next(fault for fault in self.plan if fault.number == rest[0]))
            return list(rest[1])
        else:
            getattr(self, word).append(rest if word == "between" else rest[0])
        return None

    def _resume(self, step: int, digest: str) -> None:
        """A load that isn't the first comes after an error that the script has caught."""
        done = max(self.returned, default=self.resumed[0][0] if self.resumed else 0)
        begun = max([done, *self.begun])  # an interrupt may come when it is written, and the call has not returned
        if self.resumed and not self.does("full", "files") and not done <= step <= begun:
            self.wrong.append(f"wrong step: went back to {step}, where {self.returned} were saved")
        self.resumed.append((step, digest))


def check_run(log: Log, reference: Log) -> list[str]:
    """Compare what a run has computed, and held on to, with one without faults; and how it ended with its faults."""
    different = [step for step, loss in log.losses.items() if reference.losses[step] != loss]
    wrong = [f"different losses: from step {min(different)}"] if different else []
    most = [max(counts) for counts in list(zip(*reference.between))[:3]]
    for *counts, names in log.between:
        if any(found > limit for found, limit in zip(counts, most)):
            wrong.append(f"leaks: {counts} threads, files and children between passes, not {most}: {names}")
    for step, digest in log.resumed:
        if step and digest != reference.digests[step]:
            wrong.append(f"corrupt or lost: resumed at {step} with other contents")
    return wrong + log.wrong or check_end(log)


def check_end(log: Log) -> list[str]:
    """Say what is wrong where a run hasn't ended as one of its faults, or without them, makes it end."""
    kinds = [KINDS[fault.kind] for fault in log.faults]
    wrong = [f"wrong end: caught {name}" for name in log.caught if not any(name in kind.errors for kind in kinds)]
    is_right = log.code == 0 and log.has_finished
    is_second = sum(number in (TERM, USR1) for kind in kinds for _, number in kind.signals) > 1  # ends it at once
    # Before its first save, outside of a block, a manager has no handlers.
    is_before = not log.setup.in_block and log.last_step <= (log.resumed[0][0] if log.resumed else 0) + 1
    is_right |= log.code in (-TERM, -USR1) and (is_second or is_before)
    for kind in kinds:
        is_error = log.raised not in ("", "KeyboardInterrupt", "SystemExit")
        is_right |= log.raised in kind.errors if is_error else log.code in kind.ends and (log.code or log.has_finished)
    return wrong if is_right else [*wrong, f"wrong end: {log.code}, {log.raised}"]


def check_step(log: Log, step: int) -> list[str]:
    """Say what is wrong if the newest checkpoint is older than the last one that was done, or was never begun."""
    is_orderly = log.code in (0, 1, 143) and not log.does("full", "files") and log.raised != "CheckpointError"
    sure = log.returned if is_orderly or not log.setup.asynchronous else log.returned[:-1]
    least = max([0, *sure, *(first for first, _ in log.resumed[:1])])
    least = log.last_step if log.code == 143 else least
    most = max([0, *log.begun, *(first for first, _ in log.resumed)])
    return [] if least <= step <= most else [f"wrong step: newest is {step}, not between {least} and {most}"]


def read_newest(root: Path, reference: Log) -> tuple[int | None, list[str]]:
    """Load the newest checkpoint, and verify all; return its step, or None if it is lost."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    try:
        if everygpu.CheckpointManager(root).latest() is None:
            return 0, []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step = everygpu.load(root, model=net, optimizer=optimizer)["step"]
    except Exception as error:
        return None, [f"corrupt or lost: {type(error).__name__}: {error}"[:200]]
    if digest_of(net, optimizer) != reference.digests[step]:
        return None, [f"corrupt or lost: contents of step {step} differ"]
    faults = ((path, fault) for path in sorted(root.glob("step-*")) for fault in examine(path).faults)
    return step, [f"corrupt or lost: {path.name}: {fault}" for path, fault in faults]


class Chain:
    """One training to its last step, in as many runs as its faults make of it."""

    def __init__(self, start: Callable[..., Log], root: Path, reference: Log) -> None:
        self._start, self._root, self._reference = start, root, reference
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._expected: int | None = None
        """The step that the next run must resume from."""
        self._left: set[tuple[str, int]] = set()
        """What is in the directory besides checkpoints, with inodes: the same name may be left anew."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir()

    def go(self, setup: Setup, plan: list[Fault]) -> list[Log]:
        logs: list[Log] = []
        for _ in range(3 * len(plan) + 3):
            log = self._start(setup, plan, self._root)
            found = log.resumed[0][0] if log.resumed else None
            if self._expected not in (None, found):  # the last fault's doing; what follows from it isn't counted
                logs[-1].wrong.append(f"wrong step: resumed at {found}, not {self._expected}; {log.raised}")
                self._begin_anew()
                continue
            logs.append(log)
            done = {fault.number for fault in log.faults}
            plan = [fault for fault in plan if fault.number not in done]
            log.wrong = check_run(log, self._reference)
            self._look(log)
            if log.has_finished and log.code == 0:
                break
        return logs

    def _look(self, log: Log) -> None:
        """Look at what is on the disk."""
        paths = [path for path in self._root.iterdir() if not path.name[5:].isdigit()]
        left = {(path.name, path.lstat().st_ino) for path in paths}
        # Without a free descriptor a directory can't be removed.
        new = left - self._left if log.code in (0, 1, 143) and not log.does("files") else set()
        # A run that was killed may have left its own, under an inode that was free again.
        old = left & self._left if log.code != -KILL and log.returned[log.setup.asynchronous :] else set()
        log.wrong += [f"leaks: {name} is left" for name, _ in sorted(new | old)]
        self._left = left - new - old
        self._expected, wrong = read_newest(self._root, self._reference)
        log.wrong += wrong
        if self._expected is None:
            self._begin_anew()
        else:
            log.wrong += check_step(log, self._expected)


class Driver:
    """Starts runs, and adopts what they leave behind. A run is forked, as to start Python would take seconds.

    No frame from here up may catch what a run raises: it is to end as a script's would.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._num_runs = folder, 0
        self._references: dict[tuple[str, bool], Log] = {}
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER

    def train(self, setup: Setup, plan: list[Fault]) -> list[Log]:
        """Train to the last step; return the runs that had faults."""
        key = (setup.loop, setup.asynchronous)
        if key not in self._references:
            root = self._folder / f"reference-{len(self._references)}"
            root.mkdir()
            self._references[key] = self._run(setup, [], root)
            if not self._references[key].has_finished:
                raise SystemExit(f"a run of {setup} without faults failed: {self._said(self._num_runs).read_text()}")
        logs = Chain(self._run, self._folder / "run", self._references[key]).go(setup, plan)
        for before, log in itertools.pairwise(logs):
            before.wrong += [] if log.faults else log.wrong
        return [log for log in logs if log.faults]

    def _said(self, number: int) -> Path:
        return self._folder / f"said-{number}"

    def _run(self, setup: Setup, plan: list[Fault], root: Path) -> Log:
        self._num_runs += 1
        log = Log(setup=setup, number=self._num_runs, plan=plan)
        told, its = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(self._said(self._num_runs), os.O_WRONLY | os.O_CREAT), 2)
            os.dup2(2, 1)
            os.close(told)
            run = Run(setup, plan, root, self._num_runs, its)
            try:
                run.go()
            except BaseException as error:
                run.report("raised", type(error).__name__)
                raise
            raise SystemExit(0)
        os.close(its)
        pending = self._follow(pid, told, log)
        os.close(told)
        for _, number, other in pending:
            send(other, number if number == CONT else 0)
        log.wrong += [f"leaks: {what} goes on" for what in end_orphans()]
        return log

    def _follow(self, pid: int, told: int, log: Log) -> list[tuple[float, int, int]]:
        """Read what a run tells until it has ended; return the signals that were still to be sent."""
        pending: list[tuple[float, int, int]] = []
        deadline, text, status = time.monotonic() + LONGEST_RUN_S, b"", None
        while True:
            if select.select([told], [], [], 0.002)[0]:
                text += (read := os.read(told, 2**16))
                *lines, text = text.split(b"\n")
                for line in lines:
                    workers = log.take_in(*json.loads(line))
                    pending += [] if workers is None else signals_of(log.faults[-1], pid, workers)
                if not read and status is not None:
                    break
            elif status is not None:  # a worker that goes on may have the pipe open
                break
            now = time.monotonic()
            for _, number, other in (one for one in pending if one[0] <= now):
                send(other, number)
            pending = [one for one in pending if one[0] > now]
            if status is None:
                ended, found = os.waitpid(pid, os.WNOHANG)
                status = found if ended else None
            if status is None and now > deadline:
                log.wrong.append(f"hung: after {log.last_step} steps")
                send(pid, KILL)
                deadline += LONGEST_RUN_S
        log.code = os.waitstatus_to_exitcode(status)
        return pending


def signals_of(fault: Fault, pid: int, workers: list[int]) -> list[tuple[float, int, int]]:
    """Return when, by ``time.monotonic``, which signal of a fault goes to which process."""
    target, when = KINDS[fault.kind].target, time.monotonic()
    pids = {"main": [pid], "worker": workers, "all": [pid, *workers]}[target]
    if target == "worker" and pids:
        pids = [pids[int(fault.chance * len(pids))]]
    found = []
    for after_s, number in fault.signals:
        when += after_s
        found += [(when, number, one) for one in pids]
    return found


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end_orphans() -> Iterator[str]:
    """Wait for what a run has left running; kill and name what goes on for too long."""
    deadline = time.monotonic() + ORPHANS_END_WITHIN_S
    while pids := children_of(os.getpid()):
        for pid in pids:
            send(pid, CONT)  # stopped by a fault that the run hasn't outlived
            if time.monotonic() > deadline:
                yield f"process {pid}"
                send(pid, KILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", help='these faults of one training, as "kill -9@7,SIGTERM@9", in place of drawn ones')
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2  # how often workers look whether their parent lives
    folder, num_done, num_wrong = Path(tempfile.mkdtemp(prefix="everygpu-soak-")), 0, 0
    driver = Driver(folder)
    for number in itertools.count():
        chance = random.Random(f"{options.seed} {number}")
        flags = {name: chance.random() < 0.5 for name in ("asynchronous", "goes_on", "in_block")}
        setup = Setup(loop=chance.choice(("plain", "TrainStep", "ShardedOptimizer")), **flags)
        plan = draw_plan(chance)
        if options.plan:
            setup, plan = Setup(goes_on=True), read_plan(chance, options.plan)
        for log in driver.train(setup, plan):
            num_done, num_wrong = num_done + len(log.faults), num_wrong + len(log.wrong)
            for what in log.wrong:
                print(f"{log.setup}, run {log.number}: {what}; {log.faults}", flush=True)
        print(f"{num_done} faults", flush=True)
        if options.plan or num_done >= options.faults:
            break
    shutil.rmtree(folder)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
