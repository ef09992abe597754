"""Run each row in a process of its own, and keep what comes of it; a later call goes on where one ended."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from everygpu.child import python_command
from everygpu.errors import OptionError

KEY = ("commit", "card", "model", "way", "num_devices", "rows", "precision")
"""What tells rows of a file of results apart."""
LEAST_S = 30.0
"""No row is begun with less time left."""
_KEPT_LETTERS = 2000
Row = dict[str, Any]


class Results:
    """Rows, a line of JSON each, in a file if there is a path; what is there isn't measured again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows = read_results(path) if path is not None and path.exists() else []

    def find(self, key: Mapping[str, Any]) -> Row | None:
        return next((row for row in self.rows if all(row[name] == key[name] for name in KEY)), None)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:  # one write, so that several calls may add to it
                file.write(json.dumps(row) + "\n")


def read_results(path: Path) -> list[Row]:
    """Read a file of results."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def measure_rows(
    keys: Sequence[Row], results: Results, conditions: Mapping[str, Any], timeout: float, limit_s: float
) -> Iterator[Row]:
    """Yield each row, those that are there already too; end before so many seconds have passed.

    Raises:
        OptionError: a model can't be made.
    """
    deadline = time.monotonic() + limit_s
    for key in keys:
        row = results.find(key)
        if row is not None:
            yield row
            continue
        left_s = deadline - time.monotonic()
        if left_s < LEAST_S:
            return
        job = {name: key[name] for name in ("model", "way", "num_devices", "rows", "precision")}
        command = python_command(
            "everygpu", "bench", "--row", json.dumps({**job, **conditions, "started_s": time.time()})
        )
        outcome = run_command(command, min(timeout, left_s))
        if "refused" in outcome:
            raise OptionError(outcome["refused"])
        if left_s < timeout and "error" in outcome and time.monotonic() >= deadline:
            return  # the next call has all of its time
        row = {**key, **outcome, "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}
        results.add(row)
        yield row


def find_commit() -> str:
    """Name the state of the code: git's commit if this package is in a checkout, else its version."""
    from everygpu import __version__

    folder = Path(__file__).parents[3]
    if (folder / ".git").exists():
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
        with suppress(OSError):
            found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
            return found or __version__
    return __version__


def run_command(command: list[str], timeout: float) -> dict[str, Any]:
    """Run a command whose last line is a row as JSON; a hang, which ends all it started, or a failure is its error."""
    process: subprocess.Popen[bytes] | None = None
    # Files, for a process that it leaves behind would keep a pipe open.
    with _exiting_at_sigterm(), tempfile.TemporaryFile() as out_file, tempfile.TemporaryFile() as error_file:
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
def _exiting_at_sigterm() -> Iterator[None]:
    """Turn the signal into an exception: by default it ends this process at once, and leaves what is open."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
