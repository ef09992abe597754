"""What DataParallel costs when there is one device: a training step with it against one without.

python benchmarks/one_device.py [--device cuda:0] [--models transformer resnet50] [--json FILE]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import everygpu
from everygpu.bench.report import describe_machine


def transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(16, 128, 512)


def resnet50() -> tuple[nn.Module, Tensor]:
    import torchvision

    return torchvision.models.resnet50(), torch.randn(32, 3, 224, 224)


def convnet() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(8):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), torch.randn(32, 3, 32, 32)


MODELS = {"transformer": transformer, "resnet50": resnet50, "convnet": convnet}


def make_step(net: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Seconds per step; the device is idle before and after."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / steps


def compare(name: str, device: torch.device, rounds: int, steps: int) -> dict[str, float | str]:
    """Take turns, so that both see the same machine; the ratio is the median over rounds."""
    torch.manual_seed(0)
    net, x = MODELS[name]()
    net, x = net.to(device), x.to(device)
    bare, wrapped = make_step(net, x), make_step(everygpu.DataParallel(net, [device]), x)
    for step in (bare, wrapped):
        seconds(step, steps, device)
    pairs = [(seconds(bare, steps, device), seconds(wrapped, steps, device)) for _ in range(rounds)]
    ratios = sorted(ours / theirs for theirs, ours in pairs)
    return {
        "model": name,
        "bare_ms": 1e3 * statistics.median(theirs for theirs, _ in pairs),
        "wrapped_ms": 1e3 * statistics.median(ours for _, ours in pairs),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[rounds // 4],
        "ratio_high": ratios[-1 - rounds // 4],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["transformer", "convnet"])
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    machine = describe_machine()
    print(json.dumps(machine))
    rows = [compare(name, device, options.rounds, options.steps) for name in options.models]
    for row in rows:
        print(
            f"{row['model']:12} bare {row['bare_ms']:8.3f} ms  DataParallel on one device {row['wrapped_ms']:8.3f} ms  "
            f"ratio {row['ratio']:.4f} (quartiles {row['ratio_low']:.4f} to {row['ratio_high']:.4f})"
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
