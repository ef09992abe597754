"""How a training step's cost grows with the number of GPUs, the model's parameters, and the rows of a batch.

    python benchmarks/growth.py [--gpus 1 2 4 8] [--widths 256 512 1024] [--rows 2 8 32] [--compile]
    python benchmarks/growth.py --cpu 1 2 --blocks 2 --widths 32 --rows 2 4 --steps 2     # replicas on the CPU

A GPT is trained by `TrainStep`, under bf16 autocast, on every combination. Beside each time stands what one GPU takes
for its share, with the whole update: the difference is what it costs to be several.
"""

import argparse
import gc
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import everygpu
from everygpu.bench.report import describe_machine
from everygpu.bench.timing import time_rounds
from everygpu.bench.workloads.gpt import GPT
from everygpu.bench.workloads.losses import cross_entropy

VOCABULARY = 8192
HEAD_WIDTH = 32


class Point(NamedTuple):
    """What is trained: a width of the model, and so many rows on each of so many devices."""

    width: int
    rows: int
    num_devices: int


def devices_of(options: argparse.Namespace, count: int) -> list[torch.device]:
    return [torch.device("cpu")] * count if options.cpu else [torch.device("cuda", i) for i in range(count)]


def measure(point: Point, options: argparse.Namespace) -> dict[str, Any]:
    """Train as a point says, and return its row without what one device takes."""
    torch.manual_seed(0)
    devices = devices_of(options, point.num_devices)
    model = GPT(VOCABULARY, point.width, options.blocks, point.width // HEAD_WIDTH, options.length).to(devices[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    net = everygpu.DataParallel(model, devices)
    train = everygpu.TrainStep(net, cross_entropy, optimizer, precision="bf16", compile=options.compile)
    ids = torch.randint(0, VOCABULARY, (point.rows * len(devices), options.length + 1))
    (batch,) = everygpu.Feeder([(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())], net)

    def wait() -> None:
        for d in devices:
            if d.type == "cuda":
                torch.cuda.synchronize(d)

    times = time_rounds(lambda: train(*batch), wait, options.rounds, options.steps)
    return {**point._asdict(), "num_params": sum(p.numel() for p in model.parameters()), **times}


def add_alone(rows: list[dict[str, Any]]) -> None:
    """Put beside each row what one device takes for as much, where that was measured, and the ratio."""
    alone = {(row["width"], row["rows"]): row["ms"] for row in rows if row["num_devices"] == 1}
    for row in rows:
        ms = alone.get((row["width"], row["rows"]))
        row["alone_ms"], row["efficiency"] = ms, None if ms is None else ms / row["ms"]


def points(options: argparse.Namespace) -> Iterator[Point]:
    counts = sorted(set(options.cpu or options.gpus))
    for width, rows, count in itertools.product(options.widths, options.rows, counts):
        yield Point(width, rows, count)


def describe(row: dict[str, Any]) -> str:
    efficiency = "" if row["efficiency"] is None else f", {row['efficiency']:.1%} of {row['alone_ms']:.3f} alone"
    return (
        f"{row['num_params'] / 1e6:8.1f}M parameters, {row['rows']:3} rows on each of {row['num_devices']} devices: "
        f"{row['ms']:.3f} ms ({row['ms_min']:.3f} to {row['ms_max']:.3f}){efficiency}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [n for n in (1, 2, 4, 8) if n <= torch.cuda.device_count()]
    parser.add_argument("--gpus", type=int, nargs="+", default=every, help="how many, from the first")
    parser.add_argument("--cpu", type=int, nargs="+", metavar="N", help="replicas on the CPU, instead of GPUs")
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512, 1024, 2048], help=f"times {HEAD_WIDTH}")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--length", type=int, default=512, help="tokens in a row")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8, 32], help="on each device")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not (options.cpu or options.gpus):
        raise SystemExit("no GPU: --cpu 1 2 --blocks 2 --widths 32 --rows 2 shows on the CPU that everything runs")
    if any(width < HEAD_WIDTH or width % HEAD_WIDTH for width in options.widths):
        raise SystemExit(f"--widths must be multiples of {HEAD_WIDTH}, got {options.widths}")
    return options


def main() -> None:
    options = parse()
    torch.set_float32_matmul_precision("high")
    machine, rows = describe_machine(), []
    print(json.dumps(machine), flush=True)
    for point in points(options):
        rows.append(measure(point, options))
        add_alone(rows)
        print(describe(rows[-1]), flush=True)
        gc.collect()
        if not options.cpu:
            torch.cuda.empty_cache()
    add_alone(rows)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
