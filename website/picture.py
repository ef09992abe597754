"""Draw docs/assets/speed.svg: how fast models train, beside DistributedDataParallel, as the reports say.

A bar compares two rows of one run: machines differ. It is of the newest report that measured its row beside
DistributedDataParallel on two GPUs: of the newest JSON, or of the table that ``MODELS`` names, where later reports are
in Markdown only. Needs nothing but Python::

    python website/picture.py
"""

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "benchmarks" / "reports"
PICTURE = ROOT / "docs" / "assets" / "speed.svg"


class Run(NamedTuple):
    """What one bar compares, in milliseconds a step."""

    ms: float
    ddp_ms: float


class Row(NamedTuple):
    """A row of ``everygpu bench`` in the newest JSON that has it beside DistributedDataParallel."""

    model: str
    peer: str

    def read(self) -> Run:
        for _, report in sorted(measured(), key=lambda pair: pair[0], reverse=True):
            rows = {row["peer"]: row["ms"] for row in report.get("rows", ()) if is_of(row, self.model)}
            if {"ddp", self.peer} <= set(rows):
                return Run(rows[self.peer], rows["ddp"])
        raise SystemExit(f"website/picture.py: no report has {self.peer} of {self.model} beside ddp.")


class Line(NamedTuple):
    """A line of a table in a report without JSON; a cell that is of another run than the line has no place here."""

    report: str
    begins: str
    column: str

    def read(self) -> Run:
        for cells in tables((REPORTS / f"{self.report}.md").read_text("utf-8")):
            if cells["model"].startswith(self.begins) and is_of_its_line(cells.get(self.column, "")):
                return Run(number(cells[self.column]), number(cells["DistributedDataParallel"]))
        raise SystemExit(f"website/picture.py: {self.report} has no {self.column} of {self.begins}.")


NINTH, TENTH = "2026-11-23-ninth", "2026-11-23-tenth"
LOOP, STEP = "`DataParallel`, default", "`TrainStep`, default"

MODELS: dict[str, dict[str, Row | Line]] = {
    "ResNet-18, 32 px": {
        "dp": Row("resnet18", "dp"),
        "loop": Line(NINTH, "ResNet-18", LOOP),
        "step": Row("resnet18", "step"),
    },
    "ResNet-50": {
        "dp": Row("resnet50", "dp"),
        "loop": Row("resnet50", "ours_graphs"),
        "step": Row("resnet50", "step"),
    },
    "GPT-2 124M": {
        "dp": Row("gpt2", "dp"),
        "loop": Row("gpt2", "ours_graphs"),
        "step": Row("gpt2", "step"),
    },
    "BERT, 40 lengths": {"loop": Line(TENTH, "BERT", LOOP), "step": Line(TENTH, "BERT", STEP)},
    "ViT-B/16": {"loop": Line(TENTH, "ViT", LOOP), "step": Line(TENTH, "ViT", STEP)},
    "Llama 230M": {"loop": Line(TENTH, "Llama", LOOP), "step": Line(TENTH, "Llama", STEP)},
    "U-Net": {"loop": Line(TENTH, "U-Net", LOOP), "step": Line(TENTH, "U-Net", STEP)},
    "LSTM": {"step": Line(TENTH, "two-layer LSTM", STEP)},
}
"""The models of the picture, with the bars of each."""

NAMES = {"dp": "torch.nn.DataParallel", "loop": "everygpu.DataParallel", "step": "everygpu.TrainStep"}

LEFT, UNIT, PITCH, GAP, TOP = 132, 32, 13, 9, 58
"""Pixels: where bars begin, how long 1 is, from bar to bar, between models, and above the first."""


def measured() -> list[tuple[str, dict[str, Any]]]:
    """Give the reports in JSON, each with its date."""
    reports = (json.loads(path.read_text("utf-8")) for path in REPORTS.glob("*.json"))
    return [(report["machine"]["date"], report) for report in reports]


def is_of(row: dict[str, Any], model: str) -> bool:
    return row.get("model") == model and row.get("num_devices") == 2 and {"peer", "ms"} <= set(row)


def tables(text: str) -> list[dict[str, str]]:
    """Give the lines of the tables that begin with a column for the model, by the names of their columns."""
    lines, names = list[dict[str, str]](), list[str]()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" |")] if line.startswith("|") else []
        if not cells or not names:
            names = cells
        elif names[0] == "model" and not cells[0].startswith("---"):
            lines.append(dict(zip(names, cells)))
    return lines


def is_of_its_line(cell: str) -> bool:
    return bool(cell) and "run" not in cell


def number(cell: str) -> float:
    """Read the median, which is the first number of a cell."""
    found = re.match(r"\**([\d.]+)", cell)
    if found is None:
        raise SystemExit(f"website/picture.py: a cell must begin with a number, got {cell!r}.")
    return float(found[1])


def draw() -> str:
    """Give the picture as SVG."""
    body, y = list[str](), TOP
    for model, bars in MODELS.items():
        runs = {way: source.read() for way, source in bars.items()}
        body += group(model, runs, y)
        y += PITCH * max(len(runs), 2) + GAP
    legend = [
        f'<rect class="{way}" x="{x}" y="27" width="10" height="10"/><text x="{x + 14}" y="36">{NAMES[way]}</text>'
        for way, x in zip(NAMES, (8, 166, 330))
    ]
    ruler = f'<path class="ddp" d="M{LEFT + UNIT} {TOP - 8}V{y - GAP + 4}"/>'
    return FRAME.format(height=y + 4, body="\n  ".join([*legend, *body, ruler]))


def group(model: str, runs: dict[str, Run], y: int) -> list[str]:
    """Draw a model: its name, what DistributedDataParallel took, and a bar for each way."""
    took = sorted({f"{run.ddp_ms:.1f}" for run in runs.values()}, key=float)
    lines = [
        f'<text x="8" y="{y + 9}">{model}</text>',
        f'<text class="ms" x="8" y="{y + 22}">DDP {" to ".join([took[0], *took[1:][-1:]])} ms</text>',
    ]
    for place, (way, run) in enumerate(runs.items()):
        top, width = y + PITCH * place, run.ddp_ms / run.ms * UNIT
        text = f'{run.ddp_ms / run.ms:.2f}<tspan class="ms" dx="7">{in_words(run.ms)}</tspan>'
        lines.append(f'<rect class="{way}" x="{LEFT}" y="{top}" width="{width:.1f}" height="{PITCH - 3}"/>')
        lines.append(f'<text x="{LEFT + max(width, UNIT) + 6:.1f}" y="{top + 9}">{text}</text>')
    return lines


def in_words(ms: float) -> str:
    return f"{ms:.{2 if ms < 10 else 1 if ms < 100 else 0}f} ms"


FRAME = """\
<svg class="speed" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 {height}" role="img" aria-label="\
Steps a second of eight models on two GPUs, as many times as with DistributedDataParallel.">
  <style>
    svg.speed {{ --ink: #1f2933; --pale: #64748b; --paper: #fff; font: 12px system-ui, sans-serif; }}
    @media (prefers-color-scheme: dark) {{ svg.speed {{ --ink: #e2e8f0; --pale: #94a3b8; --paper: #0d1117; }} }}
    svg.speed .paper {{ fill: var(--paper); }}
    svg.speed text {{ fill: var(--ink); }}
    svg.speed .ms {{ fill: var(--pale); font-size: 11px; }}
    svg.speed .title {{ font-weight: 700; }}
    svg.speed .dp {{ fill: #94a3b8; }}
    svg.speed .loop {{ fill: #2dd4bf; }}
    svg.speed .step {{ fill: #0f766e; }}
    svg.speed .ddp {{ fill: none; stroke: var(--ink); stroke-dasharray: 3 2; }}
  </style>
  <rect class="paper" width="480" height="{height}" rx="6"/>
  <text class="title" x="8" y="18">Speed on two H200s, times DistributedDataParallel (dashed)</text>
  {body}
</svg>
"""


def main() -> None:
    PICTURE.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
