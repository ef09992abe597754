"""How a training step's cost grows with the number of GPUs, the model's parameters, and the rows of a batch.

    python benchmarks/growth.py [--gpus 1 2 4 8] [--widths 256 512 1024] [--rows 2 8 32] [--compile]
    python benchmarks/growth.py --cpu 1 2 --blocks 2 --widths 32 --rows 2 4 --steps 2     # replicas on the CPU

A GPT is trained by `TrainStep`, under bf16 autocast, on every combination. Beside each time stands what one GPU takes
for its share, with the whole update: the difference is what it costs to be several. A line of JSON for each.
"""

import argparse
import gc
import itertools
import json
from typing import Any

import torch

import everygpu
from everygpu.bench.report import describe_machine
from everygpu.bench.timing import time_rounds
from everygpu.bench.workloads.gpt import GPT
from everygpu.bench.workloads.losses import cross_entropy

VOCABULARY = 8192
HEAD_WIDTH = 32


def measure(width: int, rows: int, devices: list[torch.device], options: argparse.Namespace) -> dict[str, Any]:
    """Train a model of a width, with so many rows on each device, and return what was measured."""
    torch.manual_seed(0)
    model = GPT(VOCABULARY, width, options.blocks, width // HEAD_WIDTH, options.length).to(devices[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    net = everygpu.DataParallel(model, devices)
    train = everygpu.TrainStep(net, cross_entropy, optimizer, precision="bf16", compile=options.compile)
    ids = torch.randint(0, VOCABULARY, (rows * len(devices), options.length + 1))
    (batch,) = everygpu.Feeder([(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())], net)

    def wait() -> None:
        for d in devices:
            if d.type == "cuda":
                torch.cuda.synchronize(d)

    times = time_rounds(lambda: train(*batch), wait, options.rounds, options.steps)
    num_params = sum(p.numel() for p in model.parameters())
    return {"width": width, "num_params": num_params, "rows": rows, "num_devices": len(devices), **times}


def main() -> None:
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
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    print(json.dumps(describe_machine()), flush=True)
    alone: dict[tuple[int, int], float] = {}
    for width, rows, count in itertools.product(options.widths, options.rows, sorted(options.cpu or options.gpus)):
        row = measure(width, rows, [torch.device("cpu" if options.cpu else f"cuda:{i}") for i in range(count)], options)
        if count == 1:
            alone[width, rows] = row["ms"]
        ms = alone.get((width, rows))
        print(json.dumps({**row, "alone_ms": ms, "efficiency": ms and ms / row["ms"]}), flush=True)
        gc.collect()
        if not options.cpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
