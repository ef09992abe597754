"""A benchmark's report: machine and versions, and rows as lines of a table and JSON."""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from everygpu import __version__

Row = Mapping[str, Any]
"""``model``, ``peer``, and what ``measure_row`` returns."""

COLUMNS = (
    ("row", 10), ("engine", 7), ("ms a step (spread)", 25), ("samples/s", 9), ("eff.", 6), ("peak GiB", 11),
    ("start", 6),
)  # fmt: skip
"""Heads, and widths in letters: 80 with the spaces between them, as a terminal has."""


def describe_machine() -> dict[str, Any]:
    """Hardware, versions and time, for the head of a report."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "everygpu": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    }


def describe_where(machine: Mapping[str, Any], num_devices: int, on_cpu: bool) -> str:
    """Write on what rows are measured."""
    versions = f"everygpu {machine['everygpu']}, torch {machine['torch']}, Python {machine['python']}"
    if on_cpu:
        threads = f"{num_devices} replicas share {machine['cpu_threads']} threads"
        return f"On the CPU: this shows that everything runs, not how fast. {threads}; {versions}"
    driver = f"ROCm {machine['rocm']}" if machine["rocm"] else f"CUDA {machine['cuda']}"
    return f"{num_devices} of {len(machine['gpus'])} x {machine['gpus'][0]}; {versions}, {driver}"


def find_efficiency(row: Row, earlier: Sequence[Row]) -> float | None:
    """Divide samples a second by those of the single GPU times the number of GPUs; None without one, or on the CPU."""
    single = [other["samples_per_s"] for other in (*earlier, row) if other["peer"] == "single" and "ms" in other]
    if "ms" not in row or not single or row["device_type"] == "cpu":
        return None
    return float(row["samples_per_s"] / (row["num_devices"] * single[0]))


def table_line(cells: Sequence[str]) -> str:
    """Pad cells to the widths of ``COLUMNS``; figures are on the right."""
    padded = [f"{x:<{width}}" if i < 2 else f"{x:>{width}}" for i, (x, (_, width)) in enumerate(zip(cells, COLUMNS))]
    return " ".join(padded).rstrip()


def describe_row(row: Row) -> str:
    """Write a row as a line of the table, or why there is none."""
    if "error" in row:
        return f"{row['peer']:<{COLUMNS[0][1]}} {row['error'].strip().splitlines()[-1]}"
    efficiency, peaks = row.get("efficiency"), row["peak_gib"]
    return table_line(
        (
            row["peer"],
            row.get("engine") or "-",
            f"{row['ms']:.2f} ({row['ms_min']:.2f} to {row['ms_max']:.2f})",
            f"{row['samples_per_s']:,.0f}",
            "-" if efficiency is None else f"{efficiency:.1%}",
            f"{max(peaks):#.3g} ({min(peaks):#.3g})".replace(". ", " ").replace(".)", ")") if peaks else "-",
            f"{row['startup_s']:.1f} s",
        )
    )


def write_json(machine: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Write everything."""
    return json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n"
