"""Where a test starts a Python that imports torch, a fork of one that has: the import is most of such a test's time.

The forks are processes of their own like any other: children of the test's process, with threads, signals, files and
an end of their own. What a Python does before it runs the first line isn't tested by them.
"""

import ctypes
import inspect
import json
import multiprocessing.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import everygpu

SERVER = Path(__file__).with_name("warm_server.py")
READ_AT_START = ("OMP_NUM_THREADS", "PYTHONSAFEPATH", "PYTHONUTF8", "PYTHONWARNINGS", "LANG", "LC_ALL")
_PR_SET_CHILD_SUBREAPER = 36


class WarmPython:
    """Forks a Python that has imported torch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        if sys.platform != "linux":
            return
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
            command = [sys.executable, str(SERVER), str(its.fileno()), str(Path(everygpu.__file__).parents[1])]
            self._server = subprocess.Popen(
                command, pass_fds=[its.fileno()], env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )

    def fork(self, args: list[str], files: dict[int, int], cwd: str, environ: dict[str, str], new_session: bool) -> int:
        """Have a fork run ``args``; return its process id: that of a child of this process.

        Args:
            files: The files it has, by their numbers there.
        """
        request = {"args": args, "numbers": list(files), "cwd": cwd, "environ": environ, "new_session": new_session}
        with self._lock, _adopting():
            socket.send_fds(self._control, [json.dumps(request).encode()], list(files.values()))
            pid = int(self._control.recv(16))
            assert self._control.recv(16) == b"done"
        return pid

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._control.close()
            self._server.wait()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Have ``subprocess``, and ``multiprocessing`` by "spawn", start Python by forks within, on Linux."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            if self._server is not None:
                monkeypatch.setattr(subprocess, "Popen", self._popen())
                monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", self._spawn)
            yield

    def _spawn(self, path: bytes, args: list[str | bytes], files: list[int]) -> int:
        words = [os.fsdecode(arg) for arg in args]
        del words[1 : words.index("-c")]  # options of the interpreter, which are this one's
        return self.fork(words, {file: file for file in (0, 1, 2, *files)}, os.getcwd(), dict(os.environ), False)

    def _popen(self) -> type:
        plain, fork = subprocess.Popen, self.fork

        class Popen(plain):
            def _execute_child(self, *arguments):
                given = inspect.signature(plain._execute_child).bind(self, *arguments).arguments
                environ = dict(os.environ if given["env"] is None else given["env"])
                if not _can_fork(given["args"], environ):
                    return super()._execute_child(*arguments)
                pipes = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
                files = {i: i if pipe < 0 else pipe for i, pipe in enumerate(pipes)}
                files.update((file, file) for file in given["pass_fds"])
                args = [os.fspath(arg) for arg in given["args"]]
                cwd = os.fspath(given["cwd"] or os.getcwd())
                self.pid = fork(args, files, cwd, environ, given["start_new_session"])
                self._child_created = True
                ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
                return self._close_pipe_fds(*(given[name] for name in ends))

        return Popen


def _can_fork(args: object, environ: dict[str, str]) -> bool:
    """Whether a command is a Python with no option of the interpreter, and nothing else that is read at start."""
    if not isinstance(args, list) or len(args) < 2 or args[0] != sys.executable:
        return False
    is_option = str(args[1]).startswith("-") and args[1] not in ("-c", "-m")
    return not is_option and all(environ.get(name, own) == own for name, own in _read_at_start())


def _read_at_start() -> list[tuple[str, str | None]]:
    return [(name, os.environ.get(name)) for name in READ_AT_START]


@contextmanager
def _adopting() -> Iterator[None]:
    """Be the parent of what children of this process's children leave behind."""
    set_option = ctypes.CDLL(None, use_errno=True).prctl
    set_option(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        set_option(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
