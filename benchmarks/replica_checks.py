"""Measure what ``TrainStep(check_every=...)`` adds to a training run: one comparison of all copies, beside one step.

    python -m benchmarks.replica_checks                # GPUs where there are several, else two CPU replicas
    python -m benchmarks.replica_checks --width 4096   # a larger model

A check is timed as what a step with one takes more than a step without, in turns: the median of the differences.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

import everygpu
from everygpu.bench.report import describe_machine


def make_step(devices: list[torch.device], width: int, check_every: int | None) -> everygpu.TrainStep:
    """Make a step of a model of about ``4 * width**2 + 2000 * width`` parameters."""
    torch.manual_seed(0)
    layers = [nn.Linear(1000, width), *(nn.Linear(width, width) for _ in range(4)), nn.Linear(width, 1000)]
    net = nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU()))).to(devices[0])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    return everygpu.TrainStep(everygpu.DataParallel(net, devices), F.cross_entropy, optimizer, check_every=check_every)


def seconds(step: everygpu.TrainStep, rows: int) -> float:
    """Time one step, until its loss is there."""
    home = step.model.replica_devices[0]
    x, y = torch.randn(rows, 1000, device=home), torch.randint(0, 1000, (rows,), device=home)
    begin = time.perf_counter()
    step(x, y).item()
    return time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for the figures, below the machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=900, help="of the layers")
    parser.add_argument("--rows", type=int, default=64, help="of a batch, for each replica")
    parser.add_argument("--turns", type=int, default=30, help="steps of either kind")
    options = parser.parse_args(arguments)
    num_gpus = torch.cuda.device_count()
    devices = [torch.device("cuda", i) for i in range(num_gpus)] if num_gpus > 1 else [torch.device("cpu")] * 2
    steps = {every: make_step(devices, options.width, every) for every in (None, 2)}
    times: dict[str, list[float]] = {"plain": [], "checked": []}
    for turn in range(2 * options.turns + 10):
        found = {every: seconds(step, options.rows * len(devices)) for every, step in steps.items()}
        if turn >= 10 and turn % 2:  # every second one has a check
            times["plain"].append(found[None])
            times["checked"].append(found[2])
    plain = statistics.median(times["plain"])
    more = sorted(b - a for a, b in zip(times["plain"], times["checked"]))
    middle, quarter = statistics.median(more), len(more) // 4
    num_params = sum(p.numel() for p in steps[2].model.parameters())
    print(describe_machine())
    share = middle / plain
    print(
        f"{num_params / 1e6:.1f} M parameters, {len(devices)} replicas: {1e3 * plain:.2f} ms a step, "
        f"{1e3 * middle:.2f} ms more with a check (half of the turns within {1e3 * more[quarter]:.2f} to "
        f"{1e3 * more[-quarter - 1]:.2f}): {share:.2%} of a step, at check_every=100 {share / 100:.3%}"
    )


if __name__ == "__main__":
    main()
