"""A benchmark's report: machine and versions, and rows as lines, tables and JSON."""

import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from everygpu import __version__
from everygpu.bench.checkout import find_commit
from everygpu.bench.peers import PEERS
from everygpu.errors import OptionError

Row = Mapping[str, Any]
"""``model``, ``peer``, and what ``measure_row`` returns."""

COLUMNS = (
    "row", "engine", "devices", "ms a step (spread)", "steps/s", "samples/s", "efficiency", "peak GiB (least)",
    "start-up",
)  # fmt: skip

EXPLANATION = (
    "Times are medians of rounds, with least and most in brackets; efficiency is samples a second over those of "
    "the best single GPU times the number of GPUs; memory is of the GPU with the most, and with the least; "
    "the engine is the one of everygpu that ran."
)
"""What the columns mean."""


def describe_machine(commit: str | None = None) -> dict[str, Any]:
    """Hardware, versions, commit and time, for the head of a report.

    Args:
        commit: The commit under test, where git can't be asked; the version stands for it where neither tells.
    """
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or find_commit() or __version__,
        "everygpu": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    }


def add_efficiency(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Compare each row with its model's best row on a single GPU.

    Returns:
        The rows with ``efficiency``: samples a second over those of the best single GPU times the number of GPUs;
        None where no single GPU was measured.
    """
    rows = list(rows)
    best: dict[str, float] = {}
    for row in rows:
        if PEERS[row["peer"]].is_single and "ms" in row:
            best[row["model"]] = max(row["samples_per_s"], best.get(row["model"], 0.0))
    return [{**row, "efficiency": _divide(row, best.get(row["model"]))} if "ms" in row else {**row} for row in rows]


def _divide(row: Row, best: float | None) -> float | None:
    return None if best is None else row["samples_per_s"] / (row["num_devices"] * best)


def describe_row(row: Row) -> str:
    """Write a row as the line that is printed when it comes."""
    head = f"{row['peer']:<16}"
    if "error" in row:
        return f"{head} {last_line(row['error'])}"
    _, engine, _, times, _, samples, _, memory, startup = fill_columns(row)
    peak = f"  peak {memory} GiB" if row["peak_gib"] else ""
    ran = f"  engine {engine}" if row.get("engine") else ""
    return f"{head} {times:>32} ms  {samples:>10} samples/s{peak}  start-up {startup}{ran}"


def fill_columns(row: Row) -> tuple[str, ...]:
    """Write the cells of a measured row under ``COLUMNS``."""
    efficiency, peaks = row.get("efficiency"), row["peak_gib"]
    return (
        row["peer"],
        row.get("engine") or "-",
        str(row["num_devices"]),
        f"{row['ms']:.2f} ({row['ms_min']:.2f} to {row['ms_max']:.2f})",
        f"{row['steps_per_s']:.2f}",
        f"{row['samples_per_s']:,.0f}",
        "-" if efficiency is None else f"{efficiency:.1%}",
        f"{max(peaks):.2f} ({min(peaks):.2f})" if peaks else "-",
        f"{row['startup_s']:.1f} s",
    )


def describe_where(machine: Mapping[str, Any]) -> str:
    """Write on what rows were measured."""
    gpus = machine["gpus"]
    hardware = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU: replicas on the CPU"
    versions = [f"{name} {machine[name]}" for name in ("everygpu", "torch", "cuda", "python") if machine[name]]
    return (
        f"Hardware: {hardware}; {machine['cpu_threads']} CPU threads. Software: {', '.join(versions)}, "
        f"{machine['system']}. Commit: {machine['commit']}."
    )


def write_markdown(machine: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Write a report: where it ran, and a table for each model."""
    lines = [f"# Ways to train, {machine['date']}", "", describe_where(machine), "", EXPLANATION]
    for model in dict.fromkeys(row["model"] for row in rows):
        its = [row for row in rows if row["model"] == model]
        size = next((describe_size(row) for row in its if "ms" in row), "")
        lines += ["", f"## {model}{size}, {its[0]['precision']}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [_line(fill_columns(row)) for row in its if "ms" in row]
        lines += ["", *(f"* {row['peer']}: {last_line(row['error'])}" for row in its if "error" in row)]
    return "\n".join(lines).rstrip() + "\n"


def describe_size(row: Row) -> str:
    """Write of what size a measured row's batches were, after the model's name."""
    count = row.get("num_batches", 1)
    return f", {row['rows_per_device']:g} rows for each GPU" + (f", {count} batches in turn" if count > 1 else "")


def write_json(machine: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Write everything."""
    return json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n"


def read_json(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read what ``write_json`` has written, here or on another machine.

    Returns:
        The machine, and the rows.
    Raises:
        OptionError: the file has something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        machine, rows = dict(found["machine"]), [dict(row) for row in found["rows"]]
        write_markdown(machine, rows)
    except (ValueError, KeyError, TypeError) as cause:
        raise OptionError(
            f"bench: --from-json needs a file that `everygpu bench --json` has written, got {path}. It lacks {cause}."
            if isinstance(cause, KeyError)
            else f"bench: --from-json needs a file that `everygpu bench --json` has written, got {path}."
        ) from cause
    return machine, rows


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def last_line(text: str) -> str:
    """Take from a traceback what went wrong."""
    return text.strip().splitlines()[-1]
