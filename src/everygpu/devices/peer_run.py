"""Run the test of copies between GPUs in a process of its own, and end it when it hangs."""

import itertools
import json
import logging
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

logger = logging.getLogger("everygpu")
Verdict = Literal["right", "wrong", "hangs", "untested"]
Pair = tuple[int, int]
_POLL_S = 0.02
_END_S = 10.0
"""For a killed process to be gone: on a busy machine the driver takes seconds to clean up after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """What came of copying from one GPU to another."""

    verdict: Verdict
    detail: str = ""
    """The fault."""
    gigabytes_per_s: float | None = None
    """10**9 bytes a second; None when not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a whole test."""

    pairs: Mapping[Pair, PairReport]
    """By positions of source and target."""
    collective: PairReport = PairReport(verdict="untested")
    """Of NCCL's sum over all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the test may take, in seconds."""

    start_s: float = 60.0
    """To load torch and to find the devices: a slow disk is no broken GPU."""
    step_s: float = 4.0
    """For a single pair, which takes milliseconds: a hanging one is found within this time."""
    total_s: float = 30.0
    """For all pairs."""


@dataclass(slots=True)
class _Progress:
    """The output of the process so far."""

    ready: list[int] | None = None
    now: Any = None
    pairs: dict[Pair, PairReport] = field(default_factory=dict)
    collective: PairReport = PairReport(verdict="untested")
    rest: Verdict = "untested"
    """Of pairs that it said nothing about."""
    is_done: bool = False
    on_pair: Callable[[int], object] = lambda num_pairs: None

    def take(self, line: str) -> None:
        """Note one line; what others write to the same stream is none of ours."""
        try:
            said = json.loads(line)
        except ValueError:
            return
        if not isinstance(said, dict):
            return
        self.ready = said.get("ready", self.ready)
        self.now = said.get("begin")
        self.is_done = "done" in said
        if "pair" in said:
            source, target = said["pair"]
            self.pairs[source, target] = _report(said)
            self.on_pair(len(self.pairs))
        elif "collective" in said:
            self.collective = _report(said)

    def give_up(self, report: PairReport) -> None:
        """The process has ended too early, by itself or by us: what it was at is to blame."""
        if self.now == "collective":
            self.collective = report
        elif self.now is not None:
            self.pairs[self.now[0], self.now[1]] = report
            self.rest = report.verdict


def _report(said: Mapping[str, Any]) -> PairReport:
    if said.get("wrong") is not None:
        return PairReport(verdict="wrong", detail=str(said["wrong"]))
    return PairReport(verdict="right", gigabytes_per_s=said.get("gigabytes_per_s"))


def examine(
    command: Sequence[str],
    environ: Mapping[str, str],
    num_devices: int,
    patience: Patience,
    on_pair: Callable[[int], object] = lambda num_pairs: None,
) -> Outcome:
    """Run the test in a process of its own, and end it when it hangs.

    Args:
        command: The process.
        environ: Its environment.
        num_devices: How many it tests.
        patience: How long it may take.
        on_pair: Called after each pair, with the number of pairs so far.
    Returns:
        A report for each ordered pair. Once a pair hangs, or ends the process, those after it count for no
        better: the GPUs are left alone.
    """
    progress = _Progress(on_pair=on_pair)
    with ExitStack() as stack:
        # A file, not a pipe: to read it never waits, whatever has become of the writer.
        try:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))) / "said"
            process = _start(command, environ, path)
        except OSError as error:
            logger.info("Copies between GPUs are not tested: %s.", error)
            return Outcome(pairs=_fill(progress, num_devices))
        try:
            with path.open(encoding="utf-8", errors="replace") as said:
                why = _follow(process, said, progress, patience)
        finally:
            _end(process)
    if why is not None:
        progress.give_up(PairReport(verdict="hangs", detail=why))
    elif not progress.is_done:
        progress.give_up(PairReport(verdict="wrong", detail=f"the test ended with exit code {process.returncode}"))
    if progress.ready is None:
        logger.info("Copies between GPUs are not tested: the test did not start (exit code %s).", process.returncode)
    return Outcome(pairs=_fill(progress, num_devices), collective=progress.collective)


def _start(command: Sequence[str], environ: Mapping[str, str], path: Path) -> "subprocess.Popen[bytes]":
    nothing = subprocess.DEVNULL
    with path.open("wb") as out:
        return subprocess.Popen(command, env=dict(environ), stdin=nothing, stdout=out, stderr=nothing)


def _follow(process: "subprocess.Popen[bytes]", said: IO[str], progress: _Progress, patience: Patience) -> str | None:
    """Read along until the process ends; say what it has exceeded if it must be ended."""
    began = stepped = time.monotonic()
    while True:
        has_ended = process.poll() is not None
        while line := said.readline():  # a line is written at once: halves are not seen
            was_ready = progress.ready is not None
            progress.take(line)
            stepped = time.monotonic()
            began = began if was_ready else stepped
        if has_ended or progress.is_done:
            return None
        if progress.ready is None:
            if time.monotonic() - began > patience.start_s:
                return "did not start"
        elif time.monotonic() - stepped > patience.step_s:
            return f"no answer in {patience.step_s:g} s"
        elif time.monotonic() - began > patience.total_s:
            return f"not done in {patience.total_s:g} s"
        time.sleep(_POLL_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill it. One that is stuck in the driver doesn't die, and isn't waited for."""
    process.kill()
    try:
        process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        logger.warning("The test of copies between GPUs (process %d) can't be ended.", process.pid)


def _fill(progress: _Progress, num_devices: int) -> dict[Pair, PairReport]:
    ready = progress.ready or []
    unknown = PairReport(verdict="untested")
    rest = unknown if progress.rest == "untested" else PairReport(verdict=progress.rest, detail="not tried any more")
    return {
        pair: progress.pairs.get(pair, rest if set(pair) <= set(ready) else unknown)
        for pair in itertools.permutations(range(num_devices), 2)
    }
