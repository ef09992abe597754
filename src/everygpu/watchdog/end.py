"""What is written when a run is stuck, and how its process ends: by no call that could get stuck as well."""

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from everygpu.exit_codes import STUCK
from everygpu.progress import SAVING_S, is_saving
from everygpu.watchdog.gpus import GpuWatch

WRITING_S = 30.0
"""The process ends this long after a save had to be done, whatever is still being written."""
RECORD_S = 5.0
"""torch's flight recorder, which asks the GPUs, has this long."""
FLUSH_S = 1.0
_ADVICE = (
    "The stacks of all threads show what it waits for. Where it only takes long, allow more: "
    "everygpu.watch(timeout=...), everygpu run --watchdog SECONDS."
)


def end_process(late: Sequence[str], timeout_s: float | None, gpus: GpuWatch | None) -> None:
    """Write what is stuck and all stacks, finish a save, and end this process; make no call of CUDA's.

    Args:
        late: What stands still, the first one first.
        timeout_s: For how long it might; None where a GPU is lost.
        gpus: Asks no more.
    """
    _within(SAVING_S + WRITING_S, lambda: os._exit(STUCK))
    if gpus is not None:
        gpus.stop()
    if timeout_s is None:
        _write(f"everygpu: {_place()}{late[0]} The process ends with exit code {STUCK}.\n")
    else:
        head = f"everygpu: {_place()}a run must go on within {timeout_s:g} s, but this stands still: {late[0]}."
        _write(f"{head} The process ends with exit code {STUCK}. {_ADVICE}\n")
        for other in late[1:]:
            _write(f"everygpu: {_place()}this stands still, too: {other}\n")
        write_stacks()
        _wait_for(RECORD_S, _write_flight_record)
    _finish_save()
    _wait_for(FLUSH_S, _flush)
    os._exit(STUCK)


def write_stacks() -> None:
    """Write the stacks of all threads of this process to standard error."""
    threads = threading.enumerate()
    names = ", ".join(f"0x{thread.ident or 0:016x} {thread.name}" for thread in threads)
    _write(f"everygpu: threads of process {os.getpid()}: {names}\n")
    with suppress(OSError, ValueError):
        faulthandler.dump_traceback(_stderr(), all_threads=True)


def _write_flight_record() -> None:
    """Write torch's record of the collectives that are not done, where ranks have a process group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    from everygpu.torch_private.distributed import open_collectives

    for line in open_collectives() or ["none"]:
        _write(f"everygpu: a collective that is not done: {line}\n")


def _finish_save() -> None:
    limit = time.monotonic() + SAVING_S
    if is_saving():
        _write(f"everygpu: a checkpoint is being saved, which is finished first, for up to {SAVING_S:g} s.\n")
    while is_saving() and time.monotonic() < limit:
        time.sleep(0.02)


def _place() -> str:
    rank = os.environ.get("RANK")
    return "" if rank is None else f"rank {rank} (host {socket.gethostname()}, process {os.getpid()}): "


def _stderr() -> int:
    with suppress(AttributeError, OSError, ValueError):  # a stream of its own, as in a notebook, or none
        return sys.stderr.fileno()
    return 2


def _write(text: str) -> None:
    """Write past the stream, whose lock a thread that is stuck may have."""
    with suppress(OSError):
        os.write(_stderr(), text.encode(errors="replace"))


def _flush() -> None:
    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()


def _within(seconds: float, function: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, function)
    timer.daemon, timer.name = True, "everygpu-watch-limit"
    with suppress(RuntimeError):
        timer.start()


def _wait_for(seconds: float, function: Callable[[], object]) -> None:
    """Call a function that may never return, and wait for it so long."""
    thread = threading.Thread(target=function, name="everygpu-watch-end", daemon=True)
    with suppress(RuntimeError):
        thread.start()
        thread.join(seconds)
