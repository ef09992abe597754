"""Tables of ``everygpu bench --results`` and ``benchmarks/coverage.py``: one for each question, with the same columns.

``benchmarks/results/figures.jsonl`` becomes the first part of docs/measured.md; ``coverage.jsonl`` becomes
docs/is-my-model-fast.md. Needs nothing but Python::

    python -m website.figures
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COVERAGE_PAGE = ROOT / "docs" / "is-my-model-fast.md"
Row = dict[str, Any]

HEAD = """# Is my model fast?

This page has {count} public models, in small versions, on one {card}, at commit {commit} with {versions}.
{loop} are captured as CUDA graphs in the usual loop around `everygpu.DataParallel`, and {step} with `TrainStep`.
In {apart} a loss of the first 13 steps differs from the eager loop's by more than 0.1%. Times are milliseconds per
step. Small models show the overhead of a step; large models gain less. Measure your own with
[`everygpu bench`](benchmarks.md).
"""


def read_lines(name: str) -> list[Row]:
    """Read a file of results; none if it isn't there. Only rows of the commit that was measured last count."""
    path = RESULTS / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    newest = max(rows, key=lambda row: row["date"], default={"commit": None})["commit"]
    return [row for row in rows if row["commit"] == newest]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)) + "\n"


def step_tables(rows: list[Row]) -> Iterable[str]:
    """Yield, for one GPU and for each other number, tables of times, of memory and of losses."""
    counts = sorted({row["num_devices"] for row in rows})
    for count in counts:
        own = [row for row in rows if row["num_devices"] == count or (row["way"] == "bare" and count > 1)]
        ways, models = (list(dict.fromkeys(row[key] for row in own)) for key in ("way", "model"))
        found = {(row["model"], row["way"]): row for row in own}
        first = own[-1]
        versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if name != "everygpu")
        yield f"## Training steps, {count} x {first['card']}\n"
        yield f"Commit {first['commit']}, {first['date'][:10]}; {versions}, {first['precision']}.\n"
        questions: dict[str, Callable[[Row, Row], str]] = {
            "Milliseconds of a step, with the fastest and the slowest round": lambda row, _: (
                f"{row['ms']:.2f} ({row['ms_min']:.2f} to {row['ms_max']:.2f})"
            ),
            "Peak memory of the fullest GPU, GiB": lambda row, _: f"{max(row['peak_gib'], default=0):.2f}",
            "Loss after the same steps, relative to `bare`": _loss,
        }
        for question, cell in questions.items():
            yield f"{question}:\n"
            yield table(
                ["", *(f"`{way}`" for way in ways)],
                [[m, *(_cell(found.get((m, way)), found.get((m, "bare"), {}), cell) for way in ways)] for m in models],
            )


def _cell(row: Row | None, bare: Row, cell: Callable[[Row, Row], str]) -> str:
    return "not measured" if row is None else "fails" if "error" in row else cell(row, bare)


def _loss(row: Row, bare: Row) -> str:
    return f"{row['last_loss'] / bare['last_loss'] - 1:+.2%}" if "last_loss" in bare else f"{row['last_loss']:.4f}"


def coverage_page(rows: list[Row]) -> str:
    """Write the page of all models that can be made, and how often each reason came."""
    made = sorted((row for row in rows if "bare" in row), key=lambda row: row["model"])
    captured = {way: sum(row[way].get("engine") == "capture" for row in made) for way in ("loop", "step")}
    reasons = Counter(row["step"].get("reason") or row["step"].get("error") for row in made)
    del reasons[None]
    apart = sum(any(row[way].get("loss_difference", 0) > 1e-3 for way in captured) for row in made)
    versions = ", ".join(f"{name} {version}" for name, version in made[0]["versions"].items() if name != "everygpu")
    where = {"card": made[0]["card"], "commit": made[0]["commit"], "versions": versions}
    head = HEAD.format(count=len(made), apart=apart, **where, **captured)
    lines = [
        [f"`{row['model']}`", *(_time(row.get(way, {})) for way in ("bare", "graph", "loop", "step"))] for row in made
    ]
    why = [[str(count), reason.replace("|", "\\|")] for reason, count in reasons.most_common()]
    parts = [head, table(["model", "eager", "a graph by hand", "DataParallel", "TrainStep"], lines)]
    parts += ["## Why some aren't captured\n", table(["models", "reason"], why)] if why else []
    return "\n".join(parts)


def _time(found: Row) -> str:
    if "ms" not in found:
        return "fails"
    return f"{found['ms']:.2f}" + (", captured" if found["engine"] == "capture" else "")


def main() -> None:
    if rows := read_lines("coverage"):
        COVERAGE_PAGE.write_text(coverage_page(rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
