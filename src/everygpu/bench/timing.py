"""Measure times in rounds of steps, and rows in processes of their own."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

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
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process: subprocess.Popen[str] | None = None
    with _heeding_sigterm():
        try:
            with _held_signals() as held:  # raised in the midst of a start, they would leave the process behind
                process = subprocess.Popen(command, **pipes, start_new_session=True)
            for number in held:
                signal.raise_signal(number)
            out, error = process.communicate(timeout=timeout)
        except BaseException as cause:  # a session of its own doesn't hear of Ctrl-C
            if process is not None:
                with suppress(ProcessLookupError):  # all that it started, too: they hold GPUs, and its pipes
                    process.kill() if sys.platform == "win32" else os.killpg(process.pid, signal.SIGKILL)
                with process:
                    process.wait()
            if isinstance(cause, subprocess.TimeoutExpired):
                return {"error": f"no result in {timeout:g} s"}
            raise
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


@contextmanager
def _heeding_sigterm() -> Iterator[None]:
    """Turn the signal into an exception: by default it ends this process alone, and the others go on holding GPUs."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
