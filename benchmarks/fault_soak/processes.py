"""Runs as processes: started, told apart from what they leave behind, and looked at through /proc."""

import contextlib
import ctypes
import json
import os
import select
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fault_soak.fork_server import ForkServer

ROOT = Path(__file__).parents[2]
SHARED = Path("/dev/shm")
ENDS_WITHIN_S = 20.0
"""How long what a run has started may go on after it: torch's workers look every 5 s whether their parent lives."""
_RUN = "from benchmarks.fault_soak.run import main; main()"  # as imported, whatever the files say by now
_TOLD_TO = 3
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000
_MNT_DETACH = 2
_DISK_BYTES, _SHARED_BYTES = 12 * 2**20, 128 * 2**20


def children_of(pid: int) -> list[int]:
    """List the processes whose parent a process is, the ended ones too that it hasn't waited for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            if path.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(path.parent.name))
    return found


def use_private_mounts(disk: Path) -> bool:
    """Give this process and all that it starts a small disk and a /dev/shm of their own; tell whether that worked."""
    call = ctypes.CDLL(None, use_errno=True)
    if call.unshare(_CLONE_NEWNS) or call.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    size = f"size={_DISK_BYTES}".encode()
    made = call.mount(b"tmpfs", str(SHARED).encode(), b"tmpfs", 0, f"size={_SHARED_BYTES}".encode())
    return not made and not call.mount(b"tmpfs", str(disk).encode(), b"tmpfs", 0, size)


def put_back_mounts(disk: Path) -> None:
    """Take the small disk away, so that its directory can be removed."""
    ctypes.CDLL(None).umount2(str(disk).encode(), _MNT_DETACH)


@dataclass(slots=True, kw_only=True)
class Left:
    """A process that outlives the run that has started it."""

    pid: int
    what: str
    run: Any
    """The run's record, to be told."""
    deadline: float


@dataclass(slots=True)
class Child:
    """A run's process."""

    pid: int
    told: int
    """Where its lines are read."""
    said: Path
    """What it writes to standard error."""
    code: int | None = None
    names: dict[int, str] = field(default_factory=dict)
    """What is known of processes it has started."""
    _text: bytes = b""

    def read_lines(self, wait_s: float = 0.0) -> list[str]:
        """Return what it has told since."""
        if not select.select([self.told], [], [], wait_s)[0]:
            return []
        with contextlib.suppress(BlockingIOError):
            self._text += os.read(self.told, 2**16)
        *lines, self._text = self._text.split(b"\n")
        return [line.decode() for line in lines]


class Starter:
    """Starts runs, and adopts what they leave behind.

    Args:
        server: Forks them.
    """

    def __init__(self, server: ForkServer) -> None:
        self._warm, self._server = server, {server.pid}
        self.left: list[Left] = []
        self._codes: dict[int, int] = {}

    def start(self, options: dict[str, Any], said: Path) -> Child:
        """Start a run."""
        told, its = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(its, True)
        path = f"{ROOT}:{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"
        environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        nothing = os.open(os.devnull, os.O_RDWR)
        error = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        args = ["python", "-c", _RUN, json.dumps(options)]
        try:
            files = {0: nothing, 1: error, 2: error, _TOLD_TO: its}
            pid = self._warm.fork(args, files, str(ROOT), environ, True)
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        finally:
            for file in (nothing, error, its):
                os.close(file)
        self._codes.pop(pid, None)  # of an earlier process with the same id
        return Child(pid, told, said)

    def reap(self) -> None:
        """Take note of processes that have ended."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._codes[found[0]] = os.waitstatus_to_exitcode(found[1])
        self.left = [left for left in self.left if left.pid not in self._codes]

    def has_ended(self, child: Child) -> bool:
        """Tell whether a run has ended, and take in what it has left behind."""
        self.reap()
        child.code = self._codes.get(child.pid)
        return child.code is not None

    def adopt(self, child: Child, run: Any) -> None:
        """Take note of what a run that has ended has left running."""
        known = self._server | {left.pid for left in self.left}
        deadline = time.monotonic() + ENDS_WITHIN_S
        for pid in set(children_of(os.getpid())) - known:
            what = child.names.get(pid, "another process")
            self._codes.pop(pid, None)
            self.left.append(Left(pid=pid, what=what, run=run, deadline=deadline))

    def overdue(self) -> list[Left]:
        """Kill and return what should have ended by now."""
        self.reap()
        now = time.monotonic()
        late = [left for left in self.left if now > left.deadline]
        for left in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(left.pid, signal.SIGKILL)
        self.left = [left for left in self.left if left not in late]
        return late

    def close(self) -> None:
        self._warm.close()
