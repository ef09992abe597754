"""Measure times in rounds of steps, and rows in processes of their own."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from everygpu.exit_codes import exiting_at_sigterm

_KEPT_LETTERS = 2000


def time_rounds(
    step: Callable[[], Any], wait: Callable[[], None], rounds: int, steps: int, warmup: int = 5
) -> dict[str, float]:
    """Time rounds of steps, after some that don't count.

    Returns:
        Milliseconds of a step: median, least and most over the rounds.
    """
    for _ in range(warmup):
        step()
    wait()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        times.append(1e3 * (time.perf_counter() - begin) / steps)
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}


def run_command(command: list[str], timeout: float) -> dict[str, Any]:
    """Run a command whose last line is a row as JSON; a hang, which ends all it started, or a failure is its error."""
    process: subprocess.Popen[bytes] | None = None
    # Files, for a process that it leaves behind would keep a pipe open.
    with exiting_at_sigterm(), tempfile.TemporaryFile() as out_file, tempfile.TemporaryFile() as error_file:
        try:
            with _held_signals() as held:  # raised in the midst of a start, they would leave the process behind
                process = subprocess.Popen(command, stdout=out_file, stderr=error_file, start_new_session=True)
            for number in held:
                signal.raise_signal(number)
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"no result in {timeout:g} s"}
        finally:  # a session of its own doesn't hear of Ctrl-C
            if process is not None:
                with suppress(ProcessLookupError):  # all that it started, too: they hold GPUs
                    process.kill() if sys.platform == "win32" else os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out, error = _read(out_file), _read(error_file)
    if process.returncode or not out.strip():
        return {"error": error.strip()[-_KEPT_LETTERS:] or f"ended with exit code {process.returncode}"}
    row: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return row


@contextmanager
def _held_signals() -> Iterator[list[int]]:
    """Give a list of the signals that come within, in place of what they do."""
    held: list[int] = []
    before = {n: signal.signal(n, lambda number, _: held.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield held
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="backslashreplace")
