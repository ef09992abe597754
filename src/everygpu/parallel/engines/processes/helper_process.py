"""A helper process as the main process sees it."""

import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import cloudpickle
import torch
from torch import Tensor

from everygpu.comm.streams import current_stream
from everygpu.errors import ReplicaError, WorkerError
from everygpu.parallel.engines.processes.child import HelperChild
from everygpu.parallel.engines.processes.helper import HELPER_FLAG, MAIN_FLAG
from everygpu.parallel.engines.processes.messages import Failed, Housekeeping, Ready, lent_with
from everygpu.parallel.engines.processes.packing import CannotTravelError
from everygpu.parallel.engines.processes.settings import Settings, read_settings, with_imported
from everygpu.parallel.engines.processes.shared_tensors import Exporter, Importer, SharedTensor
from everygpu.parallel.engines.processes.used_globals import Path
from everygpu.progress import running

START_S = 60.0
"""A helper that hasn't started by then is given up."""

_SOON_S = 1.0


class CannotStartError(Exception):
    """A helper can't be started here; the message says why."""


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
    Raises:
        CannotStartError: the system starts no further process.
    """

    def __init__(self, device: torch.device, position: int) -> None:
        self.device = device
        self.position = position
        self._name = f"replica {position} on {device}"
        self.exporter = Exporter(device)
        self.importer = Importer(device, copies_host_memory=True)
        self.dropped: list[int] = []
        """Calls whose graphs are gone, to be told with the next message."""
        self.told: dict[Path, bool] = {}
        """Variables outside modules that it knows of, and whether ``GlobalsSender`` has sent it their values."""
        self.calls: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """Calls that messages may be about, by number."""
        self.numbers = itertools.count(1)
        """Of calls."""
        self._sending = threading.Lock()
        self._turn = threading.Condition()
        self._reader: int | None = None  # the thread that waits for the next message
        self._num_writes = 0
        self._stream: torch.cuda.Stream | None = None  # which has written last
        self._settings: Settings | None = None
        self._is_ready = False
        self._is_closed = False
        self._deadline = time.monotonic() + START_S
        try:
            self._child = HelperChild(f"the helper of {self._name}", device)
        except (OSError, RuntimeError) as error:
            raise CannotStartError(f"no helper process can be started: {error}") from error
        self._connection, self._flags = self._child.connection, self._child.flags
        self._finalizer = weakref.finalize(self, self._child.end)

    @property
    def is_lost(self) -> bool:
        """Whether it has ended, or can't be spoken with any more."""
        return self._connection.is_broken

    def is_ready(self) -> bool:
        """Tell, without waiting, whether it has started."""
        if not self._is_ready and self._connection.has_message(0):
            self.wait_until_ready()
        return self._is_ready

    def wait_until_ready(self) -> None:
        """Wait for it to start.

        Raises:
            WorkerError: it has ended.
            CannotStartError: it takes too long.
        """
        while not self._is_ready:
            if not self._connection.has_message(self._deadline - time.monotonic()):
                raise CannotStartError(f"the helper of {self._name} didn't start within {START_S:.0f} s")
            self._is_ready = isinstance(self.receive(), Ready)
            self._child.has_started = True

    def keep_house(self) -> Housekeeping:
        """Return what goes along with a message; what is queued on the current stream is done before it is read."""
        stream, before = current_stream(self.device), self._stream
        self._num_writes += 1
        if stream is not None:
            if before is not None and before != stream:
                stream.wait_stream(before)  # or its earlier, smaller number might come after this one
            self._stream = stream
            self._flags.write(MAIN_FLAG, self._num_writes, stream)
        dropped, self.dropped = self.dropped, []
        return Housekeeping(given_back=self.importer.take_done(), dropped=dropped, ready=self._num_writes)

    def changed_settings(self) -> Settings | None:
        """Return the settings, if they have changed since the last call."""
        now = read_settings()
        if now == self._settings:
            return None
        self._settings = now
        return with_imported(now)

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
            # A backward and a forward may be under way in two threads.
            with self._sending, running("message", self.device, self.position, self._child.pid):
                self._connection.send(message)
        except EOFError as error:
            raise self._ended() from error

    def open(self, shared: SharedTensor, *, stays: bool = False) -> Tensor:
        """Make a tensor on memory that the helper has lent.

        Args:
            shared: The memory.
            stays: The helper goes on writing to it.
        Raises:
            WorkerError: the helper has ended, and its memory with it.
        """
        try:
            return self.importer.open(shared, follows=stays)
        except (RuntimeError, OSError) as error:
            if not self._child.ends_within(_SOON_S):
                raise
            self._connection.give_up()
            raise self._ended() from error

    def read_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Read messages, each for its call, until one thread's call has what it waits for.

        One thread reads at a time, for all others.

        Args:
            is_done: Tells whether the calling thread's call has it.
            what: The call's forward, or its backward.
        Raises:
            WorkerError: the helper has ended.
        """
        with running(what, self.device, self.position, self._child.pid):
            self._read_until(is_done)

    def _read_until(self, is_done: Callable[[], bool]) -> None:
        me = threading.get_ident()
        while True:
            try:
                with self._turn:
                    self._turn.wait_for(lambda: self._reader is None or is_done())
                    if is_done():
                        return
                    self._reader = me
                message = self.receive()
                call = self.calls.get(message.call)  # None where nothing waits for its backward any more
                if call is None:
                    self.importer.decline(lent_with(message))
                else:
                    call.take(message)
            finally:
                with self._turn:
                    if self._reader == me:
                        self._reader = None
                        self._turn.notify_all()

    def receive(self) -> Any:
        """Wait for a message.

        Raises:
            WorkerError: the helper has ended.
        """
        try:
            return self._connection.receive()
        except EOFError as error:
            raise self._ended() from error

    def raise_failure(self, message: Failed, *, in_backward: bool) -> NoReturn:
        """Raise what has been raised in the helper; its ``__cause__`` has the traceback, and names this replica.

        Args:
            message: Of a call.
            in_backward: The replica is named here. In forward ``take_values`` does so, which knows the shapes.
        """
        raised: BaseException = cloudpickle.loads(message.error)
        if message.is_refused:
            raise CannotTravelError(str(raised))
        cause: Exception = HelperTracebackError(message.trace)
        if in_backward:
            where = ReplicaError(f"backward: {self._name} failed.")
            where.__cause__, cause = cause, where
        try:
            raise raised from cause
        finally:
            del raised  # the traceback holds this frame, and those of all callers: their activations, too

    def hang_up(self) -> None:
        """Have the helper end, without waiting for it."""
        self._is_closed = True
        self._child.hang_up()

    def close(self) -> None:
        """End the helper."""
        self._is_closed = True
        self._finalizer()
        self.importer.close()

    def _ended(self) -> WorkerError:
        what = f"DataParallel: the helper process of {self._name} must"
        if self._is_closed:
            return WorkerError(
                f"{what} run from forward to backward, got a backward after it was ended, as release() and Ctrl-C do. "
                f"Run forward again."
            )
        how = self._child.describe_end()
        if not self._is_ready:
            return WorkerError(f"{what} start, but {how}\nPass engine='threads' if it can't.")
        return WorkerError(
            f"{what} run as long as the model, but {how}. What this step has computed is lost; parameters are as they "
            f"were before it, gradients may lack its share. Call zero_grad() and run the step again: a new helper "
            f"starts. If that ends, too, look for an out-of-memory killer in `dmesg`, or pass engine='threads'."
        )
