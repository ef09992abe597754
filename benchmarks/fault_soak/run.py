"""One run under faults: a training script that tells what it does, and does to itself what it is told.

    python -c "from benchmarks.fault_soak.run import main; main()" '{"setup": ..., ...}'   # writes to descriptor 3

It resumes, trains, saves, and goes on to the last step unless something ends it.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.fault_soak.faults import Faults, tell
from benchmarks.fault_soak.kinds import END, Fault
from benchmarks.fault_soak.processes import children_of
from benchmarks.fault_soak.task import EVALUATE_EVERY, datasets, digest_of
from benchmarks.fault_soak.ways import WAYS, EveryGPU, Setup, has_saved

import everygpu

_NUM_LOOKS = 6
_LONGEST_JOIN_S = 2.0


def prepare(ways: Sequence[str], worker_check_s: float) -> None:
    """Import what runs need, before they are forked; say how often workers look whether their parent lives."""
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = worker_check_s
    for way in ways:
        importlib.import_module(WAYS[way].module)
    torch.set_num_threads(1)
    model = everygpu.DataParallel(torch.nn.Linear(1, 1), ["cpu"] * 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    everygpu.Feeder([torch.ones(2)], ["cpu"])
    datasets()
    gc.collect()
    gc.freeze()


class Run:
    """One training from the newest checkpoint to the last step."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._setup = Setup(**options["setup"])
        self._digests, self._pid = options["digests"], os.getpid()
        self._root = root = Path(options["root"])
        self._training = WAYS[self._setup.way].begin(self._setup, root, options["seed"])
        plan = [Fault(**{**fault, "signals": tuple(map(tuple, fault["signals"]))}) for fault in options["plan"]]
        self._faults = Faults(plan, self._training, root)

    def go(self) -> None:
        with self._block():
            step = self._resume()
            while step < self._setup.num_steps:
                try:
                    step = self._train(step)
                    continue
                except (Exception, KeyboardInterrupt) as error:
                    is_caught = isinstance(error, Exception) or self._faults.is_caught
                    if not (is_caught and self._can_go_on()):
                        raise
                    tell("caught", type(error).__name__)
                step = self._recover()  # here no frame of the step that failed is left, and with it its batch
            self._training.end_pass()
            self._faults.finish()
            self._faults.at(step, END)
            if self._setup.in_block:  # others leave the last save to the interpreter's end
                self._training.close()
            tell("saved all")

    def _block(self) -> contextlib.AbstractContextManager[Any]:
        training = self._training
        is_used = isinstance(training, EveryGPU) and self._setup.in_block
        return training.checkpoints if is_used else contextlib.nullcontext()

    def _can_go_on(self) -> bool:
        """Tell whether to catch an error: there is a checkpoint that could be read, and this is no fork."""
        is_asked = self._setup.goes_on and os.getpid() == self._pid and self._faults.batch is not None
        return is_asked and has_saved(self._setup.way, self._root)

    def _resume(self) -> int:
        if self._setup.way == "lightning":  # tells it when its Trainer has loaded
            return 0
        step = self._training.resume()
        tell("resumed", step, digest_of(*self._training.states()) if step else "")
        return step

    def _recover(self) -> int:
        """Go back to the newest checkpoint, as docs/reliability.md says."""
        self._faults.make_room()
        self._training.net.place, self._faults.batch = "", None
        self._training.end_pass()
        with contextlib.suppress(everygpu.EveryGPUError):  # a save in the background may have met the fault, too
            self._training.wait()
        self._count()
        return self._resume()

    def _train(self, step: int) -> int:
        """Train to the end of the pass, or to the last step."""
        at, training = self._faults.at, self._training
        if self._setup.way == "lightning":
            return self._fit()
        batches = training.batches()
        while step < self._setup.num_steps:
            at(step + 1, "data")
            batch = next(batches, None)
            if batch is None:
                break
            step += 1
            self._faults.batch = batch
            loss = training.train(*batch, lambda phase: at(step, phase))  # noqa: B023
            tell("step", step, float(loss).hex(), digest_of(*training.states()) if self._digests else "")
            at(step, "save")
            self._save(step)
            self._evaluate(step)
        self._faults.batch = batch = batches = None  # they hold memory that workers share
        training.end_pass()
        self._count()
        return step

    def _fit(self) -> int:
        """Have a Trainer train to the last step."""
        training: Any = self._training
        training.digests = self._digests
        training.fit(
            on=self._faults.at,
            tell=tell,
            take=self._faults.take,
            after_step=self._evaluate,
            digest=lambda: digest_of(*training.states()),
        )
        self._faults.batch = None
        training.end_pass()
        self._count()
        return self._setup.num_steps

    def _evaluate(self, step: int) -> None:
        if step % EVALUATE_EVERY == 0:
            self._training.evaluate(datasets()[1][:64][0])

    def _save(self, step: int) -> None:
        tell("saves", step)
        if self._training.save(step):
            tell("returned", step)
        else:
            tell("not due", step)

    def _count(self) -> None:
        """Tell how many threads, files and children there are between two passes."""
        with contextlib.suppress(everygpu.EveryGPUError):
            self._training.wait()
        torch.ones((), requires_grad=True).backward()  # torch's engine keeps nodes of a failed one until the next
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "QueueFeederThread":  # of a loader's queue, which is closed: it ends by itself
                thread.join(_LONGEST_JOIN_S)
        # A thread that has been joined is in the system's list for a moment yet.
        threads = min(_num_tasks() for _ in range(_NUM_LOOKS))
        num_children = len(set(children_of(os.getpid())) - self._faults.forks())
        names = [thread.name for thread in threading.enumerate()]
        tell("between", threads, len(os.listdir("/proc/self/fd")), num_children, *names, *_open_files())


def _num_tasks() -> int:
    time.sleep(0.005)
    return len(os.listdir("/proc/self/task"))


def _open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}").replace(" ", "-"))
    return found


def main() -> None:
    options, pid, code = json.loads(sys.argv[1]), os.getpid(), [0]
    torch.set_num_threads(1)
    if options["is_quick"]:  # all but the end of modules: the first function that is registered is called last
        atexit.register(lambda: os._exit(code[0]))
    try:
        Run(options).go()
    except BaseException as error:
        if os.getpid() == pid:  # no fork
            tell("raised", type(error).__name__, str(error).replace("\n", " ")[:300])
        code[:] = [int(error.code or 0) if isinstance(error, SystemExit) else 1]
        raise
