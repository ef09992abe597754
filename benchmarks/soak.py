"""Train for many steps: no hang, no growing memory, finite losses.

python benchmarks/soak.py [--steps 10000] [--replicas 2]     # all GPUs, or replicas on the CPU
"""

import argparse
import json
import resource
import time

import torch
from torch import nn

import everygpu
from everygpu.bench.report import describe_machine


class Net(nn.Module):
    """Convolutions with BatchNorm and dropout; every seventh batch is smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2),
            nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def used_bytes(devices: list[torch.device]) -> list[int]:
    """Peak host memory, then allocated memory of each GPU."""
    gpus = [torch.cuda.memory_allocated(d) for d in devices if d.type == "cuda"]
    return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, *gpus]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, help="replicas on the CPU, instead of all GPUs")
    options = parser.parse_args()
    print(json.dumps(describe_machine()))

    everygpu.seed_all(0)
    model = everygpu.DataParallel(Net(), ["cpu"] * options.replicas if options.replicas else None)
    devices = model.device_ids
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(64, 3, 32, 32, device=devices[0]), torch.randint(0, 10, (64,), device=devices[0])
    warm: list[int] = []
    start = time.perf_counter()
    for i in range(options.steps):
        rows = 64 if i % 7 else 61
        loss = nn.functional.cross_entropy(model(x[:rows]), y[:rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i == options.steps // 10:
            warm = used_bytes(devices)
        if (i + 1) % max(1, options.steps // 10) == 0:
            rate = (i + 1) / (time.perf_counter() - start)
            print(
                f"step {i + 1:6}  loss {loss.item():.5f}  {rate:6.1f} steps/s  memory {used_bytes(devices)}", flush=True
            )
    growth = [now - before for before, now in zip(warm, used_bytes(devices))]
    print(f"growth since step {options.steps // 10}: {growth} bytes (host, then GPUs)")
    if not torch.isfinite(loss) or max(growth) >= 64 * 2**20:
        raise SystemExit("the loss is not finite, or memory grew")


if __name__ == "__main__":
    main()
