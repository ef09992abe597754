"""Plot rows: samples per second of each way of training, one panel per model."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everygpu.bench.report import Row
from everygpu.errors import OptionError

_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Tell before anything is measured whether a plot can be made.

    Raises:
        OptionError: matplotlib is missing, or the file's name ends with no format of its.
    """
    if path.suffix not in _FORMATS:
        raise OptionError(f"bench: --plot needs a file that ends with one of {', '.join(_FORMATS)}, got {path}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("bench: --plot needs matplotlib, got none. pip install 'everygpu[plots]'")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw bars with their spread, and the best single GPU times the number of GPUs as a line.

    Args:
        rows: Measured ones and others, of one model or several.
        path: Where to; the ending says the format.
    """
    from matplotlib.figure import Figure

    measured = [row for row in rows if "ms" in row]
    models = list(dict.fromkeys(row["model"] for row in measured))
    figure = Figure(figsize=(5.5 * max(1, len(models)), 4), layout="constrained")
    for position, model in enumerate(models):
        axes = figure.add_subplot(1, len(models), position + 1)
        _draw_model(axes, [row for row in measured if row["model"] == model])
        axes.set_title(model)
    figure.savefig(path, dpi=150)


def _draw_model(axes: Any, rows: Sequence[Row]) -> None:
    rates = [row["samples_per_s"] for row in rows]
    spread = [[rate * (1 - row["ms"] / row["ms_max"]) for rate, row in zip(rates, rows)],
              [rate * (row["ms"] / row["ms_min"] - 1) for rate, row in zip(rates, rows)]]  # fmt: skip
    axes.bar([row["peer"] for row in rows], rates, yerr=spread, capsize=3)
    ideal = max((row["samples_per_s"] / row["efficiency"] for row in rows if row.get("efficiency")), default=None)
    if ideal is not None:
        axes.axhline(ideal, linestyle="--", color="grey", label="best single GPU times GPUs")
        axes.legend()
    axes.set_ylabel("samples/s")
    axes.tick_params(axis="x", rotation=60)
