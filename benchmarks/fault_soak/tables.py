"""Tables of what was wrong after faults, from the runs that ``--json`` writes."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.fault_soak.checks import CLASSES
from benchmarks.fault_soak.kinds import kinds

TWO = "two at once"
Runs = Sequence[dict[str, Any]]


def rows_of(run: dict[str, Any]) -> list[str]:
    """Return the name of each fault's row: that of its kind, or of two at once."""
    steps = Counter(fault["step"] for fault in run["faults"])
    return [TWO if steps[fault["step"]] > 1 else fault["kind"] for fault in run["faults"]]


def make_table(name: str, runs: Runs) -> str:
    """Write a Markdown table of one way: a row for each kind of fault, a column for each class of what can be wrong."""
    lines = [f"| {name} | tried | " + " | ".join(CLASSES) + " |", "|---" * (len(CLASSES) + 2) + "|"]
    for row in _rows(runs):
        counts = _count_wrong(_of_row(runs, row))
        lines.append(f"| {row} | {_num_tried(runs, row)} | " + " | ".join(str(counts[c]) for c in CLASSES) + " |")
    return "\n".join(lines)


def compare(runs: Runs) -> str:
    """Write a Markdown table of several ways: how often something was wrong, and what."""
    ways = {way: [run for run in runs if run["way"] == way] for way in dict.fromkeys(run["way"] for run in runs)}
    lines = ["| fault | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    for row in _rows(runs):
        lines.append(f"| {row} | " + " | ".join(_cell(of_way, row) for of_way in ways.values()) + " |")
    return "\n".join(lines)


def _cell(runs: Runs, row: str) -> str:
    tried, found = _num_tried(runs, row), _of_row(runs, row)
    bad = sum(bool(run["wrong"]) for run in found)
    counts = _count_wrong(found)
    words = ", ".join(f"{counts[c]} {c}" for c in CLASSES if counts[c])
    return f"{bad} of {tried}" + (f": {words}" if words else "") if tried else "-"


def _rows(runs: Runs) -> list[str]:
    return [row for row in (*kinds(), TWO, "all") if _num_tried(runs, row)]


def _num_tried(runs: Runs, row: str) -> int:
    return sum(row in ("all", name) for run in runs for name in rows_of(run))


def _of_row(runs: Runs, row: str) -> Runs:
    """Return a row's runs: what is wrong after several faults in one run is counted with the last."""
    return [run for run in runs if row in ("all", rows_of(run)[-1])]


def _count_wrong(runs: Runs) -> Counter[str]:
    return Counter(name for run in runs for name in {name for name, _ in run["wrong"]})
