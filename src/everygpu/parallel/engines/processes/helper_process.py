"""A helper process as the main process sees it."""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from typing import Any

import cloudpickle
import torch

from everygpu.child import python_command
from everygpu.comm.ipc import Flags
from everygpu.comm.streams import current_stream
from everygpu.errors import WorkerError
from everygpu.parallel.engines.processes.connection import Connection
from everygpu.parallel.engines.processes.helper import HELPER_FLAG, MAIN_FLAG
from everygpu.parallel.engines.processes.messages import Failed, Housekeeping, Ready, Start, Stop
from everygpu.parallel.engines.processes.packing import CannotTravelError
from everygpu.parallel.engines.processes.settings import Settings, read_settings
from everygpu.parallel.engines.processes.shared_tensors import Exporter, Importer
from everygpu.parallel.engines.processes.used_globals import Path

END_S = 5.0
"""A helper that hasn't ended by then is killed."""

logger = logging.getLogger("everygpu")


class HelperTracebackError(Exception):
    """The traceback of an exception in a helper, as the cause of that exception here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class HelperProcess:
    """Starts a helper, speaks with it, and ends it.

    Args:
        device: Where its replica is.
        position: Of the replica.
    """

    def __init__(self, device: torch.device, position: int) -> None:
        self.device = device
        self.position = position
        self.exporter = Exporter(device)
        self.importer = Importer(device)
        self.dropped: list[int] = []
        """Calls whose graphs are gone, to be told with the next message."""
        self.told: set[Path] = set()
        """Variables outside modules whose values it has been sent, as ``GlobalsSender`` does."""
        self.in_backward: Any = None
        """The call whose backward was begun last."""
        self._flags = Flags()
        self._num_writes = 0
        self._settings: Settings | None = None
        self._is_ready = False
        self._process, self._connection = _start(self._flags)
        self._watch = _watch(self._process, self._flags, f"the helper of replica {position} on {device}")
        self._finalizer = weakref.finalize(self, _end, os.getpid(), self._process, self._connection, self._watch)
        start = Start(device=str(device), search_path=[p or os.getcwd() for p in sys.path], parent=os.getpid())
        self._connection.send(start)

    def is_ready(self) -> bool:
        """Tell, without waiting, whether it has started."""
        if not self._is_ready and select.select([self._connection], [], [], 0)[0]:
            self.wait_until_ready()
        return self._is_ready

    def wait_until_ready(self) -> None:
        """Wait for it to start.

        Raises:
            WorkerError: it has ended.
        """
        while not self._is_ready:
            self._is_ready = isinstance(self.receive(), Ready)

    def keep_house(self) -> Housekeeping:
        """Return what goes along with a message; what is queued on the current stream is done before it is read."""
        stream = current_stream(self.device)
        self._num_writes += 1
        if stream is not None:
            self._flags.write(MAIN_FLAG, self._num_writes, stream)
        dropped, self.dropped = self.dropped, []
        return Housekeeping(given_back=self.importer.take_done(), dropped=dropped, ready=self._num_writes)

    def changed_settings(self) -> Settings | None:
        """Return torch's settings, if they have changed since the last call."""
        now = read_settings()
        if now == self._settings:
            return None
        self._settings = now
        return now

    def wait_for(self, ready: int) -> None:
        """Have the current stream wait until the helper's has written its flag."""
        stream = current_stream(self.device)
        if stream is not None:
            self._flags.wait(HELPER_FLAG, ready, stream)

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            WorkerError: the helper has ended.
        """
        try:
            self._connection.send(message)
        except EOFError as error:
            raise self._ended() from error

    def receive(self) -> Any:
        """Wait for a message.

        Raises:
            WorkerError: the helper has ended.
            Exception: what the helper says has been raised there; its ``__cause__`` has the traceback.
        """
        try:
            message = self._connection.receive()
        except EOFError as error:
            raise self._ended() from error
        if not isinstance(message, Failed):
            return message
        raised: BaseException = cloudpickle.loads(message.error)
        if message.is_refused:
            raise CannotTravelError(str(raised))
        raise raised from HelperTracebackError(message.trace)

    def is_alive(self) -> bool:
        """Tell whether the process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the helper."""
        self._finalizer()
        self.importer.close()

    def _ended(self) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        how = describe_end(self._process.poll())
        return WorkerError(
            f"DataParallel: the helper process of replica {self.position} on {self.device} must run as long as the "
            f"model, but {how}. What this step has computed is lost; parameters are as they were before it. Look for "
            f"an out-of-memory killer, or pass engine='threads'."
        )


def describe_end(code: int | None) -> str:
    """Say how a process has ended."""
    if code is None:
        return "it doesn't answer"
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with exit status {code}"


def _start(flags: Flags) -> tuple["subprocess.Popen[bytes]", Connection]:
    mine, its = socket.socketpair()
    command = python_command("everygpu.parallel.engines.processes", str(its.fileno()), str(flags.fd))
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    with its:
        # In a session of its own, so that Ctrl-C reaches the main process alone.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(its.fileno(), flags.fd),
            env=environment,
            start_new_session=True,
        )
    return process, Connection(mine)


def _watch(process: "subprocess.Popen[bytes]", flags: Flags, name: str) -> threading.Event:
    """Let this process's streams go on if a helper dies, and say so; set what is returned to end a helper in peace."""
    is_wanted = threading.Event()

    def wait() -> None:
        code = process.wait()
        flags.release(HELPER_FLAG)
        if not is_wanted.is_set():
            logger.error("DataParallel: %s: %s.", name, describe_end(code))

    threading.Thread(target=wait, name="everygpu-helper-watch", daemon=True).start()
    return is_wanted


def _end(pid: int, process: "subprocess.Popen[bytes]", connection: Connection, is_wanted: threading.Event) -> None:
    if pid != os.getpid():  # a fork's copy
        return
    is_wanted.set()
    with contextlib.suppress(EOFError):
        connection.send(Stop())
    connection.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
