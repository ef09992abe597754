"""Read spoiled checkpoints in processes that are watched: what hangs, crashes or takes memory is a finding."""

import json
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from everygpu.checkpoint.foreign.formats import is_native

import everygpu
from everygpu.checkpoint.contents import read_any
from everygpu.checkpoint.verify import examine
from everygpu.errors import EveryGPUError
from tests.faults.spoil import READERS, Spoiler

LONGEST_S = 60.0
MOST_BYTES = 256 * 2**20
"""By which the process's largest resident set may grow over what it was before the case."""
REFUSED_BYTES = 4 * 2**30
"""The data limit above what the process has: a case that asks for more is a finding, and the machine stays alive."""
LONGEST_MESSAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a reader's cases."""

    num_cases: int
    results: Counter[str] = field(default_factory=Counter)
    """How often the first verb read the checkpoint, or raised which error."""
    findings: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    """By how much the resident set has grown most."""
    longest_s: float = 0.0


def fuzz(reader: str, num_cases: int, seed: int = 0) -> Outcome:
    """Read so many spoiled checkpoints; the same ones for the same seed."""
    results: Counter[str] = Counter()
    findings, peak, longest, begin = [], 0, 0.0, 0
    with tempfile.TemporaryDirectory() as directory:
        spoiler = Spoiler(Path(directory), *READERS[reader])
        while begin < num_cases:
            status, lines = _run_worker(spoiler, f"{seed} {reader}", range(begin, num_cases))
            for line in lines:
                results[line["result"]] += 1
                findings += [f"{reader} {line['case']}: {finding}" for finding in line["findings"]]
                peak, longest = max(peak, line["bytes"]), max(longest, line["s"])
            begin += len(lines)
            if status != 0:  # in the case after those that it told of
                findings.append(f"{reader} {begin}: the process ended with {_describe(status)}")
                begin += 1
    return Outcome(num_cases=num_cases, results=results, findings=findings, peak_bytes=peak, longest_s=longest)


def _describe(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"status {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    return f"no answer in {LONGEST_S} s" if number == signal.SIGALRM else signal.Signals(number).name


def _run_worker(spoiler: Spoiler, seed: str, cases: range) -> tuple[int, list[dict[str, Any]]]:
    """Fork a process that does one case after another until one is its end."""
    readable, writable = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.close(readable)
        status = 1
        try:
            _work(spoiler, seed, cases, writable)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writable)
    with os.fdopen(readable) as told:
        lines = [json.loads(line) for line in told if line.endswith("\n")]
    return os.waitpid(child, 0)[1], lines


def _work(spoiler: Spoiler, seed: str, cases: range, told: int) -> None:
    torch.set_num_threads(1)  # OpenMP's threads were not forked with it: they would be waited for
    warnings.simplefilter("ignore")
    limit = _data_bytes() + REFUSED_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for case in cases:
        path = spoiler(random.Random(f"{seed} {case}"))
        with _measured() as measured:
            results = [_result(verb, path) for verb in (_load, read_any, examine)]
        findings = [problem for _, problem in results if problem]
        if measured["bytes"] > MOST_BYTES:
            findings.append(f"took {measured['bytes'] / 2**20:.0f} MiB")
        line = {"case": case, "result": results[0][0], "findings": findings, **measured}
        os.write(told, json.dumps(line).encode() + b"\n")


@contextmanager
def _measured() -> Iterator[dict[str, Any]]:
    """Tell the time that a block takes, and how far the resident set grows; end the process where it takes long."""
    measured: dict[str, Any] = {}
    Path("/proc/self/clear_refs").write_text("5")  # the largest so far is the present one
    before = _status("VmHWM")
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    yield measured
    rest, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    measured |= {"s": LONGEST_S - rest, "bytes": _status("VmHWM") - before}


def _load(path: Path) -> None:
    everygpu.load(path, model=torch.nn.Linear(3, 2), rng=is_native(path))


def _result(verb: Any, path: Path) -> tuple[str, str]:
    """Return what came of it, and what is wrong with that."""
    try:
        report = verb(path)
    except EveryGPUError as error:
        return type(error).__name__, _fault_of(error, str(error))
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "finding", f"{verb.__name__}: {type(error).__name__} in {where.name}: {str(error)[:200]}"
    return "read", _fault_of(None, max((fault.problem for fault in getattr(report, "faults", ())), key=len, default=""))


def _fault_of(error: BaseException | None, message: str) -> str:
    if len(message) > LONGEST_MESSAGE:
        return f"a message of {len(message)} letters: {message[:200]}"
    try:
        message.encode()
    except UnicodeEncodeError:
        return f"a message that can't be printed: {message[:200]!r}"
    while error is not None:
        if isinstance(error, MemoryError) or "allocate" in str(error)[:1000]:
            return f"asked for more than {REFUSED_BYTES} bytes: {message[:200]}"
        error = error.__cause__
    return ""


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _data_bytes() -> int:
    return _status("VmData")
