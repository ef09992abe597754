"""Signals that the driver sends at some moment after a run has told of a fault."""

import contextlib
import os
import time
from typing import Any

from benchmarks.fault_soak.checks import Record
from benchmarks.fault_soak.kinds import INT, KILL, TERM, USR1, Fault, kinds
from benchmarks.fault_soak.processes import Child

Pending = list[tuple[float, int, int]]
"""When, by ``time.monotonic``, which signal, and for which process."""


def signals_of(fault: Fault, child: Child, found: dict[str, Any]) -> Pending:
    """Return the signals of a fault that a run has told of.

    Args:
        fault: Whose.
        child: The run's process.
        found: The ids of its workers, and whether it does the fault to itself.
    """
    kind, when = kinds()[fault.kind], time.monotonic()
    child.names.update(dict.fromkeys(found["worker"], "a worker"))
    groups = {"main": [child.pid], **found, "all": [child.pid, *found["worker"]]}
    pids = groups[kind.target]
    if found["itself"] or not pids:
        return []
    chosen = pids if kind.target == "all" else [pids[int(fault.chance * len(pids))]]
    signals: Pending = []
    for after_s, number in fault.signals:
        when += after_s
        signals += [(when, number, pid) for pid in chosen]
    return signals


def has_ended_at_once(record: Record) -> bool:
    """Tell whether a run couldn't see its processes out: it was killed, or a second signal has ended it."""
    asking = [n for fault in record.faults for _, n in fault.signals if n in (INT, TERM, USR1)]
    return record.code == -KILL or (-record.code in asking and len(asking) > 1)


def send_due(pending: Pending) -> Pending:
    """Send the signals whose time has come; return the others."""
    now = time.monotonic()
    for when, number, pid in pending:
        if when <= now:
            send(pid, number)
    return [one for one in pending if one[0] > now]


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
