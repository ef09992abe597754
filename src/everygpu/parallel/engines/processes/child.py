"""The process of a helper: how it is started, watched and ended."""

import contextlib
import logging
import os
import subprocess
import threading
from collections.abc import Iterator

import torch

from everygpu.child import python_command
from everygpu.comm.ipc import Flags
from everygpu.parallel.engines.processes.connection import Connection, connected
from everygpu.parallel.engines.processes.ends import describe_end, remove_shared_memory
from everygpu.parallel.engines.processes.helper import HELPER_FLAG
from everygpu.progress import Helper, progress

END_S = 5.0
"""A helper that hasn't ended by then is killed."""

_MOST_BYTES, _MOST_LINES = 2**16, 12
_OTHER_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

logger = logging.getLogger("everygpu")


class HelperChild:
    """A helper's process, the connection to it, and the flags that streams of both processes write.

    Its standard input is empty. It writes to this process's standard output and standard error; what it says while it
    starts is kept, to be quoted if it fails.

    Args:
        name: In the log.
        device: Whose streams wait for flags.
    Raises:
        OSError: no process can be started, or no file opened.
        RuntimeError: no thread can be started.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._owner = os.getpid()
        self.has_started = False
        """Whether it serves, and writes to this process's standard error."""
        self._is_wanted = True
        with contextlib.ExitStack() as undo:
            self.flags = Flags()
            undo.callback(self.flags.close)
            self._stderr = os.memfd_create("everygpu-helper-stderr")
            undo.callback(os.close, self._stderr)
            self._process, self.connection = self._start()
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            progress().helpers[self.pid] = Helper(name, self._kill)  # before the watch, which takes it away again
            undo.callback(progress().helpers.pop, self.pid, None)
            self._watch = threading.Thread(target=self._wait, name="everygpu-helper-watch", daemon=True)
            self._watch.start()
            undo.pop_all()

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Tell whether it runs."""
        return self._process.poll() is None

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end; tell whether it has come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.is_alive()

    def describe_end(self) -> str:
        """Say how it has ended, with its last words if it hadn't started yet."""
        self.ends_within(END_S)
        how = describe_end(self._process.poll())
        return how if self.has_started else how + self._last_words()

    def hang_up(self) -> None:
        """Have it end; what streams of this process do with its memory is done first."""
        self._is_wanted = False
        if self._owner == os.getpid():  # not a fork's copy
            self._synchronize()
            self.connection.hang_up()
            if not self.has_started:  # it would go on importing torch
                self._process.kill()

    def end(self) -> None:
        """End it, and give back what it needed."""
        if self._owner != os.getpid():
            return
        self.hang_up()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._watch is not threading.current_thread():
            self._watch.join()
        self.connection.close()
        os.close(self._stderr)
        self.flags.close()

    def _start(self) -> tuple["subprocess.Popen[bytes]", Connection]:
        environment = {k: v for k, v in os.environ.items() if k not in _OTHER_ALLOCATORS}
        with connected() as (mine, its), _duplicate_of_stderr() as stderr:
            inherited = (its.fileno(), self.flags.fd, stderr)
            name = "everygpu.parallel.engines.processes"
            process = subprocess.Popen(
                python_command(name, *map(str, (*inherited, os.getpid(), self._device))),
                stdin=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=inherited,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process alone
            )
        return process, mine

    def _wait(self) -> None:
        """Once it has ended, let streams and threads go on that wait for it, and say so."""
        code = self._process.wait()
        progress().helpers.pop(self.pid, None)
        self.flags.release(HELPER_FLAG)
        self.connection.cut()  # a fork made at the wrong moment may keep the other end open
        remove_shared_memory(self._process.pid)
        if self._is_wanted and code:
            logger.error("DataParallel: %s: %s.", self._name, describe_end(code))

    def _kill(self) -> None:
        """End it with this process, without a call of CUDA's."""
        self._is_wanted = False
        self._process.kill()

    def _synchronize(self) -> None:
        if self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            with contextlib.suppress(RuntimeError):  # a device that has failed does nothing any more
                torch.cuda.synchronize(self._device)

    def _last_words(self) -> str:
        text = os.pread(self._stderr, _MOST_BYTES, max(0, os.fstat(self._stderr).st_size - _MOST_BYTES))
        lines = text.decode(errors="replace").splitlines()[-_MOST_LINES:]
        return "; its last words: " + "\n    ".join(["", *lines]) if lines else ""


@contextlib.contextmanager
def _duplicate_of_stderr() -> Iterator[int]:
    try:
        fd = os.dup(2)
    except OSError:  # closed, as in a daemon
        fd = os.open(os.devnull, os.O_WRONLY)
    try:
        yield fd
    finally:
        os.close(fd)
