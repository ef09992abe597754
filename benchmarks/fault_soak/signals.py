"""Signals that the driver sends at some moment after a run has told of a fault."""

import contextlib
import os
import signal
import time
from typing import Any

from benchmarks.fault_soak.checks import Record
from benchmarks.fault_soak.kinds import GIVEN_UP_S, INT, KILL, TERM, USR1, Fault, kinds
from benchmarks.fault_soak.processes import Child

Pending = list[tuple[float, int, int]]
"""When, by ``time.monotonic``, which signal, and for which process."""


def signals_of(fault: Fault, child: Child, found: dict[str, Any]) -> Pending:
    """Return the signals of a fault that a run has told of.

    Args:
        fault: Whose.
        child: The run's process.
        found: The ids of its workers and helpers, and whether it does the fault to itself.
    """
    kind, when = kinds()[fault.kind], time.monotonic()
    for name in ("worker", "helper"):
        child.names.update(dict.fromkeys(found[name], f"a {name}"))
    groups = {"main": [child.pid], **found, "all": [child.pid, *found["worker"], *found["helper"]]}
    pids = groups[kind.target]
    if found["itself"] or not pids:
        return []
    chosen = {"helper": pids[-1:], "all": pids}.get(kind.target, [pids[int(fault.chance * len(pids))]])
    signals: Pending = []
    for after_s, number in fault.signals:
        when += after_s
        signals += [(when, number, pid) for pid in chosen]
    if kind.options.get("gives up"):
        signals.append((when + GIVEN_UP_S, signal.SIGKILL, child.pid))
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
