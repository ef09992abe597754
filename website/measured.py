"""Write docs/measured.md from benchmarks/results: what README and the pages cite. Needs nothing but Python::

python -m website.measured
"""

import json
import re
import string
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from website.figures import read_lines, step_tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "measured.md"

Row = dict[str, Any]
"""What was measured, of what, where and when: a median in ms with the least and the most, or a value with its unit."""

HEAD = """# Measured

README and the other pages cite these figures. `python -m website.measured` writes this page from
`benchmarks/results/*.json`. A step's time is the median in milliseconds, with the least and the most in brackets.
Machines differ, so compare within a line. [Benchmarks](benchmarks.md) measures your machine. † means that the code has
changed since, and that the row was not measured again.
"""

ENGINES = ("capture", "graphs", "threads", "compile")

TITLES = {
    "steps": "Training steps",
    "checkpoints": "Checkpoints",
    "faults": "Faults",
    "costs": "What safety costs",
    "ranks": "One process per GPU",
    "one-gpu": "One GPU, models that everygpu wasn't tuned for",
    "sharded": "Models larger than one GPU",
}
"""The sections of the page, in this order; what other files have is cited nowhere."""

WORKLOADS = {
    "bert": "BERT, 40 lengths",
    "bert_8": "BERT, 8 batches",
    "bert_12": "BERT, 12 lengths",
    "convnext_t": "ConvNeXt-T",
    "convnext_t128": "ConvNeXt-T, 32 rows of 128 px",
    "convnext_t128_default": "ConvNeXt-T, 32 rows of 128 px, cuDNN's defaults",
    "deberta_v2": "DeBERTa-v2, 8 layers",
    "diffusion": "diffusion, 24 convolutions",
    "efficientnet_v2_s": "EfficientNetV2-S, 128 px",
    "gemma2": "Gemma 2, 8 layers",
    "gpt2": "GPT-2 124M",
    "gpt2_8k": "GPT-2 124M, 8 x 1,024",
    "gpt2_checkpointed": "GPT-2 124M, checkpointed",
    "gpt2_compiled": "GPT-2 124M, compiled",
    "llama": "Llama 230M",
    "lstm": "LSTM",
    "mlp": "MLP of 27 layers",
    "moe": "mixture of experts",
    "resnet18": "ResNet-18, 32 px",
    "qwen2": "Qwen2, 12 layers",
    "qwen2_512": "Qwen2, 12 layers of width 512",
    "qwen2_512_32k": "Qwen2, 12 layers of width 512, 32,000 tokens",
    "resnet18_64": "ResNet-18, 64 px",
    "resnet50": "ResNet-50",
    "simclr": "SimCLR, ResNet-18",
    "t5_3": "T5, 3 pairs of lengths",
    "t5_12": "T5, 12 pairs of lengths",
    "unet": "U-Net",
    "vit": "ViT-B/16",
    "vit_b_16": "ViT-B/16",
    "vit_mae": "ViT-MAE",
    "whisper": "Whisper, small",
}
ROWS = {
    "single": "one GPU",
    "single_graph": "one GPU, one CUDA graph",
    "single_compiled": "one GPU, torch.compile by hand",
    "dp": "nn.DataParallel",
    "ddp": "DDP",
    "loop": "DataParallel",
    "threads": "DataParallel, threads",
    "graphs": "DataParallel, captured",
    "step": "TrainStep",
    "step_eager": "TrainStep, not captured",
    "step_compiled": "TrainStep, compiled",
    "fsdp_to_fsdp2": "speed relative to FSDP2 by hand",
    "held_bytes": "memory between steps",
    "peak_bytes": "peak memory",
}


def read(name: str) -> list[Row]:
    """Give the rows of a file of results."""
    rows: list[Row] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return rows


def page() -> str:
    """Write the page."""
    return "\n".join([HEAD, *step_tables(read_lines("figures")), *(part for name in TITLES for part in section(name))])


def section(name: str) -> Iterable[str]:
    """Write a section: the machines, by letters where there are several, and a table."""
    yield f"## {TITLES[name]}\n"
    # Replicas and ranks that share a GPU tell what a change costs, not how fast two GPUs are.
    rows = [r for r in read(name) if " x " in r["hardware"] or r.get("replicas", 1) * r.get("ranks", 1) == 1]
    machines = list(dict.fromkeys(row["hardware"] for row in rows))
    letters = dict(zip(machines, string.ascii_uppercase)) if machines[1:] else {}
    described = []
    for machine in machines:
        newest = [row for row in rows if row["hardware"] == machine][-1]
        versions = ", ".join(f"{part} {v}" for part, v in newest["versions"].items() if part != "everygpu")
        described.append(f"{letters.get(machine, '')}: {machine}; {versions}.".removeprefix(": "))
    yield "\n".join(f"* {line}" for line in described) + "\n" if letters else f"{described[0]}\n"
    yield "\n".join(table(rows, letters)) + "\n"


def table(rows: list[Row], letters: dict[str, str]) -> Iterable[str]:
    """Lay rows out by what was measured; of times, those of one commit are a line."""
    columns = sorted(dict.fromkeys(row["row"] for row in rows), key=place)
    lines: dict[tuple[str, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: list(letters).index(row["hardware"]) if letters else 0):
        key = row["hardware"], row["workload"], row["commit"] if "median_ms" in row else ""
        lines.setdefault(key, []).append(row)
    on = " on |" if letters else ""
    yield f"| |{on} {' | '.join(map(column_name, columns))} | when |"
    yield f"|---|{'---|' * (len(columns) + bool(letters))}---|"
    for (machine, workload, _), of_line in lines.items():
        cells = {row["row"]: cell(row) for row in of_line}
        commits = ", ".join(dict.fromkeys(row["commit"] for row in of_line))
        newest = max(of_line, key=lambda row: row["date"])
        when = f"{commits}, {newest['date'][:10]}{' †' * newest.get('changed_since', False)}"
        on = f" {letters[machine]} |" if letters else ""
        yield f"| {workload_name(workload)} |{on} {' | '.join(cells.get(name, '') for name in columns)} | {when} |"


def place(row: str) -> int:
    """Sort columns as ``ROWS`` has them; others stay in the order they came in, after these."""
    name = row if row in ROWS else row.rpartition("_")[0]
    return list(ROWS).index(name) if name in ROWS else len(ROWS)


def workload_name(workload: str) -> str:
    model, colon, what = workload.partition(":")
    return WORKLOADS.get(model, model) + colon + with_words_of_today(what)


def with_words_of_today(text: str) -> str:
    """Say capture where older results say graphs, or that a step is recorded."""
    return re.sub(r"\b(graphs|recorded)\b", "captured", text)


def column_name(row: str) -> str:
    """Name a row; ``_x2`` and ``_r2`` at its end are two replicas, and two ranks."""
    name, _, end = row.rpartition("_")
    several = {"x": "replicas", "r": "ranks"}.get(end[:1]) if end[1:].isdigit() else None
    return f"{ROWS.get(name, name)}, {end[1:]} {several}" if several else ROWS.get(row, row)


def cell(row: Row) -> str:
    if "median_ms" in row:
        text = f"{row['median_ms']:.2f}" + between(row, "least_ms", "most_ms", ".2f")
    else:
        text = f"{row['value']:g} {row['unit']}" * (row["unit"] != "ratio") or f"{row['value']:g}"
        text += between(row, "least", "most", "g")
    # Of the loop as it is, the note is the engine it chose.
    has_note = row["note"] and ("value" in row or row["row"].startswith("loop") or row["note"] not in ENGINES)
    return f"{text}, {with_words_of_today(row['note'])}" if has_note else text


def between(row: Row, least: str, most: str, form: str) -> str:
    return f" ({row[least]:{form}} to {row[most]:{form}})" if least in row else ""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
