"""The faults that a run does to itself, and those it asks the driver for."""

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.fault_soak.kinds import Fault, kinds
from benchmarks.fault_soak.own import EveryGPU
from benchmarks.fault_soak.processes import SHARED
from benchmarks.fault_soak.setup import Training
from benchmarks.fault_soak.task import datasets
from tests.faults.inject import die_at

import everygpu

TOLD_TO = 3
_LONGEST_FORK_S = 20
FILL = "fill"
_FULL_FOR = 4
"""Steps for which a disk stays full."""


def tell(*words: object) -> None:
    """Tell the driver."""
    os.write(TOLD_TO, (" ".join(map(str, words)) + "\n").encode())


def _leave(free_bytes: int, folder: Path) -> None:
    """Fill what a folder is on, but for so much."""
    found = os.statvfs(folder)
    with open(folder / FILL, "wb") as file, contextlib.suppress(OSError):  # it is fuller than that
        os.posix_fallocate(file.fileno(), 0, max(1, found.f_bavail * found.f_frsize - free_bytes))


class Faults:
    """Does what the plan says, where it says."""

    def __init__(self, plan: list[Fault], training: Training, root: Path) -> None:
        self._plan, self._training, self._root = plan, training, root
        self._forks: list[tuple[Fault, int]] = []
        self._full_until: int | None = None
        self._limits = {which: resource.getrlimit(which) for which in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)}
        self.batch: Any = None
        self.is_caught = False
        """Whether Ctrl-C is caught, and the training goes on, as in the next cell of a notebook."""
        if any("caught" in kinds()[fault.kind].options for fault in plan):
            sys.ps1 = ">>> "  # there is a prompt, as in a notebook

    def at(self, step: int, phase: str) -> None:
        """Do what is to be done at a place of a step."""
        if self._full_until is not None and step >= self._full_until:
            self.make_room()
        self._look_after_forks()
        while self._plan and self._plan[0].step < step:
            self._plan.pop(0)
        while self._plan and (self._plan[0].step, self._plan[0].phase) == (step, phase):
            self._do(self._plan.pop(0))

    def take(self, batch: Any) -> None:
        """Take note of the batch that is trained on."""
        self.batch = batch

    def _do(self, fault: Fault) -> None:
        options = kinds()[fault.kind].options
        workers = [child.pid for child in multiprocessing.active_children()]
        # By the driver at some moment, or by itself between two steps of a save: peers have none that Python sees.
        itself = "dies" in options and fault.chance < 0.5 and isinstance(self._training, EveryGPU)
        tell("fault", fault.number, json.dumps({"worker": workers, "itself": itself}))
        if itself:
            die_at(1 + int(2 * fault.chance * options["dies"]))
        self.is_caught = "caught" in options
        if "fails" in options and self.batch is not None:
            self._training.net.fail_at(options["fails"], options["error"], self.batch[0], fault.replica)
        if "tells" in options:
            self._training.samples.tell(options["tells"])
        if fault.phase == "data" and fault.signals:
            self._training.samples.tell("slow")
        if "fills" in options:
            self._fill_disk(int(fault.chance * options["fills"]))
        if "files" in options:
            most = len(os.listdir("/proc/self/fd")) + int(fault.chance * options["files"])
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, self._limits[resource.RLIMIT_NOFILE][1]))
        if "shared" in options and os.path.ismount(SHARED):
            _leave(int(fault.chance * options["shared"]), SHARED)
        if {"fills", "files", "shared"} & options.keys():
            self._full_until = fault.step + _FULL_FOR
        if "forks" in options:
            self._fork(fault, options["forks"])

    def _fill_disk(self, free_bytes: int) -> None:
        """Leave little room on a disk of this run alone; elsewhere, little room for each file."""
        if os.path.ismount(self._root.parent):
            _leave(free_bytes, self._root.parent)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes // 2, self._limits[resource.RLIMIT_FSIZE][1]))

    def make_room(self) -> None:
        """Undo what fills disks and memory, and limits."""
        self._full_until = None
        for folder in (self._root.parent, SHARED):
            (folder / FILL).unlink(missing_ok=True)
        for which, limits in self._limits.items():
            resource.setrlimit(which, limits)

    def _fork(self, fault: Fault, what: str) -> None:
        pid = os.fork()
        if pid:
            self._forks.append((fault, pid))
            return
        signal.alarm(_LONGEST_FORK_S)
        if what == "ends":
            sys.exit(0)
        if what == "calls":
            self._call()
        os._exit(0)

    def _call(self) -> None:
        """Call the model, as an evaluation in a forked process does; end with 1 where what comes out is wrong."""
        try:
            images = datasets()[1][:64][0]
            found = self._training.evaluate(images)
            net = self._training.net.eval()
            torch.testing.assert_close(torch.as_tensor(found), net(images).detach())
        except everygpu.EveryGPUError as error:
            os.write(2, f"the fork's call: {error}\n".encode())
        except BaseException as error:  # noqa: BLE001 - it must not go on as a second training
            os.write(2, f"the fork's call: {error!r}\n".encode())
            os._exit(1)

    def _look_after_forks(self) -> None:
        for fault, pid in tuple(self._forks):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._forks.remove((fault, pid))
                tell("fork", fault.number, os.waitstatus_to_exitcode(status))

    def forks(self) -> set[int]:
        """Return the ids of forks that haven't been waited for."""
        return {pid for _, pid in self._forks}

    def finish(self) -> None:
        """Wait for forks."""
        while self._forks:
            self._look_after_forks()
            time.sleep(0.005)
