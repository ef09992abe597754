"""Runs a function in several processes that find each other as under torchrun."""

import contextlib
import importlib
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
LIMIT_S = 120
HEAD_START_S = 0.2
"""Of rank 0: torch tries again only 5 s later where there is no store to connect to yet."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(rank: int, size: int, port: int, local_size: int | None = None) -> dict[str, str]:
    """What torchrun sets, with as many processes on each box."""
    local = size if local_size is None else local_size
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONFAULTHANDLER": "1",
    }


class Ranks:
    """Processes that run a function of a test module, one for each rank.

    Args:
        function: At the top of its module; called with ``args`` in each process.
        size: How many.
        folder: Where results are written.
        local_size: Processes on each box.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        size: int,
        folder: Path,
        local_size: int | None = None,
    ) -> None:
        port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.files = [folder / f"result{rank}" for rank in range(size)]
        call = pickle.dumps((function.__module__, function.__qualname__, args)).hex()
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, file in enumerate(self.files):
            if rank == 1:
                time.sleep(HEAD_START_S)
            command = [sys.executable, "-m", "tests.ranks.child", call, str(file)]
            self.processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONPATH": paths, **environment(rank, size, port, local_size)},
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        self.said: list[str] = []
        """What each has written to its standard error, and before it to its standard output."""

    def wait(self, limit_s: float = LIMIT_S) -> list[int]:
        """Wait for all; return their exit codes."""
        for p in self.processes:
            out, err = p.communicate(timeout=limit_s)
            self.said.append(out.decode() + err.decode())
        return [p.returncode for p in self.processes]

    def results(self, limit_s: float = LIMIT_S) -> list[Any]:
        """Wait for all, which have to succeed; return what the function has returned in each."""
        codes = self.wait(limit_s)
        assert codes == [0] * len(codes), "\n".join(self.said)
        return [pickle.loads(file.read_bytes()) for file in self.files]

    def kill(self) -> None:
        for p in self.processes:
            p.kill()
            p.communicate()


@contextlib.contextmanager
def running(
    function: Callable[..., Any], *args: Any, size: int, folder: Path, local_size: int | None = None
) -> Iterator[Ranks]:
    ranks = Ranks(function, args, size, folder, local_size)
    try:
        yield ranks
    finally:
        ranks.kill()


def run_ranks(
    function: Callable[..., Any], *args: Any, size: int, folder: Path, local_size: int | None = None
) -> list[Any]:
    """Call a function in each of several ranks; return what each has returned."""
    with running(function, *args, size=size, folder=folder, local_size=local_size) as ranks:
        return ranks.results()


def run_checks(*checks: Callable[[], Any], size: int, folder: Path) -> list[dict[str, Any]]:
    """Call functions of a test module one after another in each of several ranks; return what each returns, by name."""
    return run_ranks(call_each, checks[0].__module__, [check.__name__ for check in checks], size=size, folder=folder)


def call_each(module: str, names: list[str]) -> dict[str, Any]:
    """Call functions, each as if it were the first: shown before an error is which one it was."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        print(name, flush=True)
        found[name] = getattr(importlib.import_module(module), name)()
    return found
