"""Measure what ``TrainStep(check_every=...)`` adds to a training run: a comparison of all copies, beside a step.

    python -m benchmarks.replica_checks                # GPUs where there are several, else two CPU replicas
    python -m benchmarks.replica_checks --width 4096   # a larger model

Steps and comparisons take turns; the devices are waited for after each. Medians, and the range of the middle half.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

import everygpu
from everygpu.bench.report import describe_machine


def make_step(devices: list[torch.device], width: int) -> everygpu.TrainStep:
    """Make a step of a model of about ``4 * width**2 + 2000 * width`` parameters."""
    torch.manual_seed(0)
    layers = [nn.Linear(1000, width), *(nn.Linear(width, width) for _ in range(4)), nn.Linear(width, 1000)]
    net = nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU()))).to(devices[0])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    return everygpu.TrainStep(everygpu.DataParallel(net, devices), F.cross_entropy, optimizer, check_every=10**9)


def seconds(work: Callable[[], object]) -> float:
    """Time what waits for the devices by itself."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def middle_half(times: Sequence[float]) -> str:
    """Return the median, and what half of the times lie within, in ms."""
    low, middle, high = (1e3 * t for t in statistics.quantiles(times, n=4))
    return f"{middle:.2f} ms ({low:.2f} to {high:.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for the figures, below the machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=900, help="of the layers")
    parser.add_argument("--rows", type=int, default=64, help="of a batch, for each replica")
    parser.add_argument("--turns", type=int, default=30, help="steps, and checks")
    options = parser.parse_args(arguments)
    num_gpus = torch.cuda.device_count()
    devices = [torch.device("cuda", i) for i in range(num_gpus)] if num_gpus > 1 else [torch.device("cpu")] * 2
    step = make_step(devices, options.width)
    rows = options.rows * len(devices)
    x, y = torch.randn(rows, 1000, device=devices[0]), torch.randint(0, 1000, (rows,), device=devices[0])
    steps, checks = [], []
    for turn in range(options.turns + 10):
        times = seconds(lambda: step(x, y).item()), seconds(step._replica_check.compare)
        if turn >= 10:
            steps.append(times[0])
            checks.append(times[1])
    share = statistics.median(checks) / statistics.median(steps)
    num_params = sum(p.numel() for p in step.model.parameters())
    print(describe_machine())
    print(
        f"{num_params / 1e6:.1f} M parameters, {len(devices)} replicas: a step {middle_half(steps)}, "
        f"a check {middle_half(checks)}: {share:.2%} of a step, with check_every=100 {share / 100:.3%}"
    )


if __name__ == "__main__":
    main()
