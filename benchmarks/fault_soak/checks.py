"""What is checked after a run."""

import re
import signal
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.fault_soak.kinds import TERM, USR1, Fault, kinds
from benchmarks.fault_soak.log import Log
from benchmarks.fault_soak.setup import Setup
from benchmarks.fault_soak.task import digest_of
from benchmarks.fault_soak.ways import read_newest

from everygpu.checkpoint.verify import examine

CLASSES = ("corrupt or lost", "wrong step", "different losses", "leaks", "hung", "wrong end")
_ENDS_WITHOUT_US = (-TERM, -USR1)
_CHECKPOINT = {
    "everygpu": re.compile(r"step-\d{8}"),
    "torch": re.compile(r"checkpoint\.pt"),
    "dcp": re.compile(r"\d{8}"),
    "lightning": re.compile(r"\d{8}\.ckpt"),
}

Wrong = list[tuple[str, str]]
"""One of the classes, and what it was."""


@dataclass(slots=True, kw_only=True)
class Record:
    """One run, its faults and what was wrong."""

    setup: Setup
    number: int
    faults: list[Fault]
    said: Path
    """What it has written to standard error."""
    code: int = 0
    raised: str | None = None
    seconds: float = 0.0
    wrong: Wrong = field(default_factory=list)


def check_beginning(log: Log, expected: int | None, reference: Log) -> Wrong:
    """Say what is wrong with what a run has resumed from, where there was a run before it."""
    if expected is None:
        return []
    if not log.resumed:
        return [("corrupt or lost", f"not resumed: {log.raised}: {log.message}")]
    step, wrong = log.resumed[0][0], check_contents(log.resumed[:1], reference)
    return wrong if step == expected else [*wrong, ("wrong step", f"resumed at {step}, not at {expected}")]


def check_contents(resumed: Collection[tuple[int, str]], reference: Log) -> Wrong:
    """Compare what was loaded with what a run without faults had at that step."""
    steps = [step for step, digest in resumed if step and digest != reference.digests[step]]
    return [("corrupt or lost", f"resumed at {step} with other contents") for step in steps]


def check_numbers(log: Log, reference: Log) -> Wrong:
    """Compare what a run has computed, and held on to, with one without faults."""
    different = [step for step, loss in log.losses.items() if reference.losses.get(step) != loss]
    wrong = [("different losses", f"from step {min(different)}")] if different else []
    most = [max(counts) for counts in list(zip(*reference.between))[:3]]
    for *counts, names in log.between:
        for name, found, limit in zip(("threads", "files", "children"), counts, most):
            if found > limit:
                wrong.append(("leaks", f"{found} {name} between two passes, not {limit}: {names}"))
    return wrong + log.wrong + check_contents(log.resumed[1:], reference)


def check_end(setup: Setup, log: Log, code: int) -> Wrong:
    """Say what is wrong where a run hasn't ended as one of its faults, or without them, makes it end."""
    allowed = [kinds()[fault.kind] for fault in log.done]
    wrong = [f"fork {number} ended with {end}" for number, end in log.forks.items() if end not in (0, -signal.SIGTERM)]
    for raised in log.caught if setup.way == "everygpu" else ():
        if not any(raised in kind.errors for kind in allowed):
            wrong.append(f"caught {raised}")
    is_right = code == 0 and log.has_finished
    is_second = sum(number in (TERM, USR1) for kind in allowed for _, number in kind.signals) > 1  # ends it at once
    is_right |= code in _ENDS_WITHOUT_US and (is_second or _is_before_a_save(setup, log))
    if not is_right and not any(kind.is_right(code, log.raised, setup.way) for kind in allowed):
        wrong.append(f"ended with {code}, {log.raised}: {log.message}")
    return [("wrong end", what) for what in wrong]


def _is_before_a_save(setup: Setup, log: Log) -> bool:
    """Tell whether signals did what they do without a CheckpointManager, as its documents say."""
    return not setup.in_block and log.last_step <= (log.resumed[0][0] if log.resumed else 0) + 1


def check_step(setup: Setup, log: Log, code: int, step: int) -> Wrong:
    """Say what is wrong if the newest checkpoint is older than the last one that was done, or was never begun."""
    is_orderly = code in (0, 1, 143) and not log.was_full and log.raised != "CheckpointError"
    least = log.announced(asynchronous=setup.asynchronous, is_orderly=is_orderly)
    if log.resumed:
        least = max(least, log.resumed[0][0])
    if code == 143:
        least = log.last_step
    most = max([*log.begun, *(step for step, _ in log.resumed)], default=0)
    if least <= step <= most:
        return []
    return [("wrong step" if step else "corrupt or lost", f"newest is {step}, not between {least} and {most}")]


def read_whole(setup: Setup, root: Path, reference: Log, damaged: Path | None) -> tuple[int | None, Wrong]:
    """Load the newest checkpoint, and verify all where that can be done; return its step, or None if it is lost.

    Args:
        setup: Of the training.
        root: Where it saves.
        reference: A run without faults.
        damaged: One that was damaged, and may still be there.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if damaged or setup.way != "everygpu" else "error")
            newest = read_newest(setup.way, root)
    except Exception as error:  # noqa: BLE001 - whatever a saver fails with
        return None, [("corrupt or lost", f"{type(error).__name__}: {error}"[:200])]
    if newest is None:
        return 0, []
    step, *states = newest
    if digest_of(*states) != reference.digests.get(step):
        return None, [("corrupt or lost", f"contents of step {step} differ")]
    saved = [path for path in sorted(root.glob("step-*")) if path != damaged] if setup.way == "everygpu" else []
    faults = [(path, fault) for path in saved for fault in examine(path).faults]
    return step, [("corrupt or lost", f"{path.name}: {fault}") for path, fault in faults]


Left = set[tuple[str, int]]
"""Names in a directory, each with its inode: the same name may have been left anew."""


def leftovers(setup: Setup, root: Path) -> Left:
    """List what is in a training's directory that is no checkpoint."""
    found = {path for path in root.iterdir() if not _CHECKPOINT[setup.way].fullmatch(path.name)}
    found |= {path for path in root.iterdir() if setup.way == "dcp" and not (path / ".metadata").exists()}
    return {(path.name, path.lstat().st_ino) for path in found}


def check_leftovers(setup: Setup, log: Log, code: int, before: Left, now: Left) -> list[tuple[str, str]]:
    """Say what is left where nothing was killed, or where a save has been done since: names, and after what.

    Without a free descriptor a directory can't be removed.
    """
    had_files = not any("files" in kinds()[fault.kind].options for fault in log.done)
    new = now - before if code in (0, 1, 143) and had_files else set()
    has_saved = log.announced(asynchronous=setup.asynchronous, is_orderly=False)
    old = before & now if has_saved else set()
    wrong = [(name, f"is left after an end with {code}") for name, _ in sorted(new)]
    return wrong + [(name, "is left after the next save") for name, _ in sorted(old)]
