"""What `benchmarks/all.py` has found in a folder, against the goals: a report in Markdown."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from everygpu.bench.report import Row, add_efficiency, write_markdown

ON_EIGHT = {"gpt2": 3250, "gpt2-64-rows": 3.75e6 / 1024, "resnet50": 37_500, "resnet18": 600_000}
"""Samples a second, of `TrainStep`'s faster row; GPT-2's are of 1,024 tokens."""
RATIOS = (
    ("ours", "ddp", 0.98),
    ("step", "ddp", 1.0),
    ("step_compiled", "ddp_compiled", 1.0),
    ("ours_ranks", "ddp", 0.98),
    ("step_ranks", "ddp", 1.0),
    ("step_ranks", "step", 0.97),
    ("step_ranks_of_2", "step", 0.97),
)
EFFICIENCY = 0.98
FED = 1.02
BALANCE = 1.05
_LEAST_GIB = 1.0
_MOST_LINES = 60


class Goal(NamedTuple):
    """A line of the table."""

    part: str
    what: str
    wanted: str
    found: str
    is_met: bool


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """Return the records in the order in which they ended, each with its ``rows`` and the lines it ``printed``."""
    paths = [path for path in folder.glob("*.json") if not path.name.endswith(".rows.json")]
    return [read_record(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime)]


def read_record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    rows, text = path.with_suffix(".rows.json"), path.with_suffix(".txt")
    printed = text.read_text().rstrip().splitlines() if text.exists() else []
    return {**record, "rows": json.loads(rows.read_text())["rows"] if rows.exists() else [], "printed": printed}


def check(record: Mapping[str, Any]) -> Iterator[Goal]:
    """Yield what a part was to reach."""
    name, rows = record["name"], record["rows"]
    yield Goal(name, "ends well", "done", record["end"], record["end"] == "done")
    if name == "feeding":
        for row in rows:
            yield Goal(name, f"{row['model']}: fed / there", f"<= {FED}", f"{row['ratio']:.3f}", row["ratio"] <= FED)
    if any("peer" in row for row in rows):
        yield from check_rows(name, rows)


def check_rows(name: str, rows: Sequence[Row]) -> Iterator[Goal]:
    """Yield the goals of a model whose rows were measured in one run."""
    by_peer = {row["peer"]: row for row in add_efficiency(rows) if "ms" in row}
    for row in rows:
        if "ms" not in row and row["peer"] != "single_graph":  # which refuses batches that differ
            yield Goal(name, row["peer"], "a figure", "none", False)
    speed = {peer: row["samples_per_s"] for peer, row in by_peer.items()}
    count = max((row["num_devices"] for row in by_peer.values()), default=1)
    for ours, theirs, least in RATIOS:
        if ours in speed and theirs in speed:
            yield at_least(name, f"{ours} / {theirs}", speed[ours] / speed[theirs], least)
    steps = [peer for peer in ("step", "step_compiled") if peer in speed]
    best = max(steps, key=lambda peer: speed[peer], default=None)
    if best and count > 1 and by_peer[best]["efficiency"] is not None:
        yield at_least(name, f"{best} / {count} x best single", by_peer[best]["efficiency"], EFFICIENCY)
    if count >= 8:
        if "dp" in speed and "ours" in speed:
            yield at_least(name, "ours / dp", speed["ours"] / speed["dp"], 10)
        if best and name in ON_EIGHT:
            yield at_least(name, f"{best}, samples/s", speed[best], ON_EIGHT[name])
    for peer in ("ours", "step"):
        peaks = by_peer.get(peer, {}).get("peak_gib") or [0.0]
        if max(peaks) > _LEAST_GIB:
            balance = max(peaks) / min(peaks)
            yield Goal(name, f"{peer}: memory, most / least", f"<= {BALANCE}", f"{balance:.3f}", balance <= BALANCE)


def at_least(part: str, what: str, value: float, least: float) -> Goal:
    def text(number: float) -> str:
        return f"{number:,.0f}" if number >= 100 else f"{number:.3g}" if number >= 10 else f"{number:.3f}"

    return Goal(part, what, f">= {text(least)}", text(value), value >= least)


def write_report(folder: Path) -> str:
    """Write what a folder holds: the goals, the tables of rows, and what the other parts printed.

    Raises:
        SystemExit: there is nothing in it.
    """
    records = read_folder(folder)
    if not records:
        raise SystemExit(f"{folder} holds no records: run some parts first")
    rows = [{**row, "model": r["name"]} for r in records for row in add_efficiency(of_bench(r))]
    commits = sorted({record["machine"]["commit"] for record in records})
    goals = [goal for record in records for goal in check(record)]
    lines = [write_markdown({**records[-1]["machine"], "commit": ", ".join(commits)}, rows)]
    lines += ["## Goals", "", "| part | what | wanted | found | met |", "|---|---|---|---|---|"]
    lines += [f"| {g.part} | {g.what} | {g.wanted} | {g.found} | {'yes' if g.is_met else '**no**'} |" for g in goals]
    lines += ["", "## All parts", "", "| part | ended | s | commit |", "|---|---|---|---|"]
    lines += [f"| {r['name']} | {r['end']} | {r['seconds']:.0f} | {r['machine']['commit']} |" for r in records]
    for record in records:
        if not of_bench(record):  # whose rows are in the tables above
            lines += ["", f"## {record['name']}", "", "```text", *record["printed"][-_MOST_LINES:], "```"]
    return "\n".join(lines) + "\n"


def of_bench(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in record["rows"] if "peer" in row]
