"""Train for many steps: no hang, no growing memory, finite losses, and with TrainStep equal replicas at the end.

python benchmarks/soak.py [--steps 10000] [--replicas 2] [--engine graphs | --train-step]   # all GPUs, or the CPU
"""

import argparse
import json
import logging
import resource
import time
from collections.abc import Callable

import torch
from torch import nn

import everygpu
from everygpu.bench.report import describe_machine
from everygpu.parallel.engines.table import ENGINES


class Net(nn.Module):
    """Convolutions with BatchNorm and dropout; every seventh batch is smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2),
            nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10),
        )  # fmt: skip

        self.checks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checks:  # bits of every parameter, added up: one number per replica
            return sum(p.view(torch.int32).sum() for p in self.parameters())
        return self.body(x)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target) if output.is_floating_point() else output.double().mean()


def make_step(model: everygpu.DataParallel, *, whole: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if whole:
        return everygpu.TrainStep(model, loss_of, optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def check_replicas(step: everygpu.TrainStep, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Tell whether all replicas' parameters are equal, bit for bit."""
    step.model.module.checks = True
    sums = set(step.evaluate(x, y).output.reshape(-1).tolist())  # one replica gives a number alone
    print(f"replicas' checksums: {sorted(sums)}")
    return len(sums) == 1


def used_bytes(devices: list[torch.device]) -> list[int]:
    """Peak host memory, then allocated memory of each GPU."""
    gpus = [torch.cuda.memory_allocated(d) for d in devices if d.type == "cuda"]
    return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, *gpus]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, help="replicas on the CPU, instead of all GPUs")
    parser.add_argument("--train-step", action="store_true", help="with TrainStep, in place of the usual loop")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="of the usual loop")
    options = parser.parse_args()
    print(json.dumps(describe_machine()))
    logging.basicConfig(level=logging.INFO)  # which way steps are run, and why

    everygpu.seed_all(0)
    used = ["cpu"] * options.replicas if options.replicas else None
    model = everygpu.DataParallel(Net(), used, engine=options.engine)
    devices = list(model.replica_devices)
    step = make_step(model, whole=options.train_step)
    x, y = torch.randn(64, 3, 32, 32, device=devices[0]), torch.randint(0, 10, (64,), device=devices[0])
    warm: list[int] = []
    start = time.perf_counter()
    for i in range(options.steps):
        rows = 64 if i % 7 else 61
        loss = step(x[:rows], y[:rows])
        if i == options.steps // 10:
            warm = used_bytes(devices)
        if (i + 1) % max(1, options.steps // 10) == 0:
            rate = (i + 1) / (time.perf_counter() - start)
            print(
                f"step {i + 1:6}  loss {loss.item():.5f}  {rate:6.1f} steps/s  memory {used_bytes(devices)}", flush=True
            )
    growth = [now - before for before, now in zip(warm, used_bytes(devices))]
    print(f"growth since step {options.steps // 10}: {growth} bytes (host, then GPUs)")
    if options.train_step and not check_replicas(step, x, y):
        raise SystemExit("replicas differ")
    if not torch.isfinite(loss) or max(growth) >= 64 * 2**20:
        raise SystemExit("the loss is not finite, or memory grew")


if __name__ == "__main__":
    main()
