"""Draw docs/assets/speed.svg: how fast models train on two GPUs, beside DistributedDataParallel.

A bar compares two rows of one run, as machines differ: the newest of ``benchmarks/results/steps.json`` that has both.
Needs nothing but Python::

    python -m website.picture
"""

import sys
from pathlib import Path
from typing import NamedTuple

from website.measured import WORKLOADS, Row, read

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "assets" / "speed.svg"

GPUS = "2 x NVIDIA H200"
MODELS = ("resnet18", "resnet50", "gpt2", "bert", "vit", "llama", "unet", "lstm")
WAYS = {"dp": ("dp",), "loop": ("loop", "graphs"), "step": ("step",)}
"""The bars of a model, with the rows that they may be of: the loop as it is, or by the engine it takes."""


class Run(NamedTuple):
    """What one bar compares, in milliseconds a step."""

    ms: float
    ddp_ms: float


def find(rows: list[Row], model: str, way: str) -> Run | None:
    """Give the newest run with both rows; None if there is none."""
    found = [row for row in rows if row["workload"] == model and row["hardware"] == GPUS]
    ddp = {(row["date"], row["commit"]): row["median_ms"] for row in found if row["row"] == "ddp"}
    runs = [
        (row["date"], Run(row["median_ms"], ddp[row["date"], row["commit"]]))
        for row in found
        if row["row"] in WAYS[way] and (row["date"], row["commit"]) in ddp
    ]
    return max(runs)[1] if runs else None


def bars(model: str) -> dict[str, Run]:
    """Give the runs of a model by the ways that were measured."""
    rows = read("steps")
    return {way: run for way in WAYS if (run := find(rows, model, way)) is not None}


NAMES = {"dp": "torch.nn.DataParallel", "loop": "everygpu.DataParallel", "step": "everygpu.TrainStep"}

LEFT, UNIT, PITCH, GAP, TOP = 132, 32, 13, 9, 58
"""Pixels: where bars begin, how long 1 is, from bar to bar, between models, and above the first."""


def draw() -> str:
    """Give the picture as SVG."""
    body, y = list[str](), TOP
    for model in MODELS:
        runs = bars(model)
        body += group(WORKLOADS[model], runs, y)
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
