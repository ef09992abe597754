"""How everygpu starts another Python process, and forks, and the cores that they share."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

# The path is set before anything is imported. Where the interpreter puts the working directory, there is an empty name;
# it puts none under PYTHONSAFEPATH.
_CODE = """import sys
sys.path[:not sys.path[0]] = [{root!r}]
import runpy
runpy.run_module({module!r}, run_name="__main__")
"""


def python_command(module: str, *args: str) -> list[str]:
    """Write the command that runs a module of this package, and no file of the working directory, as -m would."""
    code = _CODE.format(root=str(Path(__file__).parents[1]), module=module)
    return [sys.executable or "python", "-c", code, *args]


def count_cores(system: Path = Path("/")) -> int:
    """Count the cores that this process may use, at least one: by its affinity, and by its cgroup's share of time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(int, _quotas(system))]))


def _quotas(system: Path) -> Iterator[float]:
    """Give the limits of this process's cgroup and those around it; in a container the outermost is at the root."""
    with suppress(OSError):
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root, names = system / "sys/fs/cgroup", ["cpu.max"]
            if controllers:  # of v1
                root, names = root / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
                if "cpu" not in controllers.split(","):
                    continue
            own = root / path.lstrip("/")
            for folder in (own, *own.parents):
                with suppress(OSError, ValueError):  # "max", which is none, is no number
                    quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                    if quota > 0:
                        yield quota / period
                if folder == root:
                    break


STARTS_S = (1.0, 5.0, 20.0, 60.0)
"""How long a forked process may take to run its first line, at each try."""


def guard_forks(context: BaseContext) -> BaseContext:
    """Return a context of multiprocessing's whose forked processes come out of their fork; others as they are."""
    return _Context() if sys.platform != "win32" and type(context) is ForkContext else context


if sys.platform != "win32":
    from multiprocessing.context import ForkContext, ForkProcess

    class _Child(ForkProcess):
        """A process that is forked again where it doesn't come out of its fork."""

        # A C++ thread that takes the GIL for the first time, as gloo's do to free a collective's tensors, locks
        # CPython's list of thread states without it. A child that is forked meanwhile waits for that lock for ever, as
        # PyOS_AfterFork_Child takes it before it is made again.
        ends: tuple[socket.socket, socket.socket]
        is_stuck = False

        def run(self) -> None:
            """Report that this process runs, and begin on request: one that is killed before must hold no lock."""
            parents, own = self.ends
            parents.close()
            own.send(b".")
            if own.recv(1):
                super().run()

        @staticmethod
        def _Popen(process: Any) -> Any:  # noqa: N802 - multiprocessing's name
            for limit_s in STARTS_S:
                process.ends = socket.socketpair()
                with process.ends[0] as ours:
                    with process.ends[1]:
                        started = ForkProcess._Popen(process)
                    ours.settimeout(limit_s)
                    with suppress(TimeoutError):
                        with suppress(ConnectionError):  # it has died, which is seen later
                            ours.send(ours.recv(1))
                        return started
                started.kill()
                started.wait()
            process.is_stuck = True
            return started

    class _Context(ForkContext):
        Process = _Child
