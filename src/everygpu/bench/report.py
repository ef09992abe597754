"""Rows of a benchmark as lines of a table, and where they were measured."""

import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from everygpu import __version__

Row = Mapping[str, Any]
"""``runner.KEY``, and what ``measure_row`` returns."""

COLUMNS = (
    ("way", 13), ("engine", 7), ("ms a step (spread)", 23), ("samples/s", 9), ("eff.", 6), ("peak GiB", 10),
    ("loss", 6),
)  # fmt: skip
"""Heads, and widths in letters: 80 with the spaces between them, as a terminal has."""


def describe_versions() -> dict[str, Any]:
    """Return the versions of all that has a part in a figure."""
    on_nvidia = torch.cuda.is_available() and torch.version.cuda
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_nvidia else None  # type: ignore[no-untyped-call]
    found = {
        "everygpu": __version__, "torch": torch.__version__, "cuda": torch.version.cuda, "rocm": torch.version.hip,
        "nccl": nccl, "python": sys.version.split()[0],
    }  # fmt: skip
    return {name: version for name, version in found.items() if version}


def find_card(device_type: str) -> str:
    """Name the GPU, or what else rows are measured on."""
    return torch.cuda.get_device_name() if device_type == "cuda" else f"CPU, {platform.machine()}"


def describe_where(card: str, versions: Mapping[str, Any], num_devices: int) -> str:
    """Write on what rows are measured."""
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    if not card.startswith("CPU"):
        return f"{num_devices} x {card}; {names}"
    threads = f"{num_devices} replicas share {torch.get_num_threads()} threads"
    return f"On the CPU: this shows that everything runs, not how fast. {threads}; {names}"


def compare_with_bare(row: Row, rows: Sequence[Row]) -> dict[str, float | None]:
    """Compare a row with the eager single GPU on the same model.

    Returns:
        ``efficiency``: samples a second over those of the single GPU times the number of GPUs; None on the CPU, whose
        replicas share its cores. ``loss_difference``: how far the loss after warm-up is from its loss, relatively.
    """
    same = ("commit", "card", "model", "rows", "precision")
    others = (other for other in rows if other["way"] == "bare" and all(other[k] == row[k] for k in same))
    other = next(others, {})
    if "ms" not in row or "ms" not in other:
        return {"efficiency": None, "loss_difference": None}
    is_cpu = row["card"].startswith("CPU")
    speed = row["samples_per_s"] / (row["num_devices"] * other["samples_per_s"])
    difference = abs(row["last_loss"] - other["last_loss"]) / max(abs(other["last_loss"]), 1e-9)
    return {"efficiency": None if is_cpu else speed, "loss_difference": difference}


def table_line(cells: Sequence[str]) -> str:
    """Pad cells to the widths of ``COLUMNS``; figures are on the right."""
    padded = [f"{x:<{width}}" if i < 2 else f"{x:>{width}}" for i, (x, (_, width)) in enumerate(zip(cells, COLUMNS))]
    return " ".join(padded).rstrip()


def describe_row(row: Row, rows: Sequence[Row]) -> str:
    """Write a row as a line of the table, or why there is none."""
    if "error" in row:
        return f"{row['way']:<{COLUMNS[0][1]}} {row['error'].strip().splitlines()[-1]}"
    found, peaks = compare_with_bare(row, rows), row["peak_gib"]
    efficiency, difference = found["efficiency"], found["loss_difference"]
    return table_line(
        (
            row["way"],
            row["engine"] or "-",
            f"{row['ms']:.2f} ({row['ms_min']:.2f}-{row['ms_max']:.2f})",
            f"{row['samples_per_s']:,.0f}",
            "-" if efficiency is None else f"{efficiency:.1%}",
            f"{max(peaks):#.3g} ({min(peaks):#.3g})".replace(". ", " ").replace(".)", ")") if peaks else "-",
            "-" if difference is None else f"{difference:.2%}",
        )
    )
