"""What one of the two processes does when the other has ended."""

import contextlib
import os
import re
import select
import signal
import socket
import time
from pathlib import Path

_SHARED, _SELF = Path("/dev/shm"), Path("/proc/self/fd")
_LOOK_EVERY_S = 0.2
_LONGEST_EXIT_S = 5.0


def follow(parent: int, end: socket.socket) -> None:
    """End this process with its parent, whatever it is doing.

    A process that has forked workers keeps its end of the socket open in them, so that its death is no hang-up: it is
    seen by its child's having another parent. The parent shuts one direction down to have this process end in peace;
    both are shut when it has died.

    Args:
        parent: The id of the process that has started this one.
        end: This process's end of a socket that leads there.
    """
    hang_up = select.poll()
    hang_up.register(end, select.POLLRDHUP)
    while os.getppid() == parent:
        for _, events in hang_up.poll(_LOOK_EVERY_S * 1000):
            if not events & select.POLLHUP:
                os._exit(0)
            _await_other_parent(parent)
    remove_shared_memory(parent)
    os._exit(1)


def leave_signals_to_parent() -> None:
    """Go on at the signals that ask a whole job to end, as schedulers send them to each of its processes.

    The main process saves at them after this step, which it can't do without this process, and then ends both.
    """
    for name in ("SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(
                getattr(signal, name), lambda *_: None
            )  # a program that this process starts doesn't ignore them


def remove_shared_memory(pid: int) -> None:
    """Remove what a process that has ended left in /dev/shm.

    torch gives each piece of shared host memory a name, and takes the name away at once. SIGKILL may come in between.
    Where there is too little room, torch raises an error and leaves the name, with as much as there was room for.
    """
    for path in _SHARED.glob(f"torch_{pid}_*"):
        with contextlib.suppress(OSError):
            path.unlink()


def remove_failed_share(error: RuntimeError) -> None:
    """Remove the file in /dev/shm that torch failed to make, and close it: torch leaves the name and the descriptor.

    Args:
        error: torch's, which names the file where there is one.
    """
    found = re.search(r"</?(torch_\d+_\d+_\d+)>", str(error))
    if not found:
        return
    path = _SHARED / found[1]
    for number in _SELF.iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            if number.readlink() == path:
                os.close(int(number.name))
    path.unlink(missing_ok=True)


def describe_end(code: int | None) -> str:
    """Say how a process has ended."""
    if code is None:
        return "it doesn't answer"
    if code >= 0:
        return f"it ended with exit status {code}"
    with contextlib.suppress(ValueError):  # not every signal has a name
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it was ended by signal {-code}"


def _await_other_parent(parent: int) -> None:
    """Wait until a process that has closed its files is gone; one that has closed them and goes on isn't waited for."""
    deadline = time.monotonic() + _LONGEST_EXIT_S
    while os.getppid() == parent:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.01)
