"""Whether results are the same bits on several lists of devices, and what that costs.

    python benchmarks/same_bits.py --devices 0 0,1 --replicas 2
    python benchmarks/same_bits.py --devices 0 0,0 --replicas 2                     # one card, acting as two devices
    python benchmarks/same_bits.py --devices cpu cpu,cpu --models mlp --steps 20

Each model is trained in bf16, in a loop and by ``TrainStep``, in a process of its own with a time limit. A line of JSON
for each as it comes: the hash of all losses, parameters and buffers, milliseconds per step, each GPU's peak memory.
In the end a line for each model says whether its hashes are equal. ``--replicas 0`` leaves ``num_replicas`` out.
ResNet-18 and ConvNeXt-T need torchvision, GPT-2 needs transformers.
"""

import argparse
import hashlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import everygpu
from everygpu.bench.runner import run_command
from everygpu.parallel import gather

MakeBatch = Callable[[int], tuple[Tensor, Tensor]]


def images(size: int) -> MakeBatch:
    return lambda rows: (torch.randn(rows, 3, size, size), torch.randint(1000, (rows,)))


def make_mlp() -> tuple[nn.Module, MakeBatch]:
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1000)]
    return nn.Sequential(*layers), lambda rows: (torch.randn(rows, 64), torch.randint(1000, (rows,)))


def make_resnet18() -> tuple[nn.Module, MakeBatch]:
    from torchvision.models import resnet18

    return resnet18(), images(64)


def make_convnext() -> tuple[nn.Module, MakeBatch]:
    from torchvision.models import convnext_tiny

    return convnext_tiny(), images(96)


class GPT2(nn.Module):
    """GPT-2 small, with its dropout of 0.1."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(GPT2Config(use_cache=False))

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits  # type: ignore[no-any-return]


def make_gpt2() -> tuple[nn.Module, MakeBatch]:
    return GPT2(), lambda rows: (torch.randint(50257, (rows, 256)), torch.randint(50257, (rows, 256)))


def criterion(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of all positions: torch's kernel for one more dimension has no order of its own."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


MODELS = {"mlp": make_mlp, "resnet18": make_resnet18, "gpt2": make_gpt2, "convnext_tiny": make_convnext}
WAYS = ("loop", "step")


def parse_devices(text: str) -> list[int | str]:
    return [int(name) if name.isdigit() else name for name in text.split(",")]


def train(model: str, way: str, devices: list[int | str], options: argparse.Namespace) -> dict[str, Any]:
    """Train one model in one way; return its hash, and what it took."""
    torch.use_deterministic_algorithms(True)
    everygpu.seed_all(0)
    module, make_batch = MODELS[model]()
    on_gpus = devices[0] != "cpu"
    home = torch.device("cuda", int(devices[0])) if on_gpus else torch.device("cpu")
    module.to(home)
    net = everygpu.DataParallel(module, devices, num_replicas=options.replicas or None)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    step = everygpu.TrainStep(net, criterion, optimizer, precision="bf16") if way == "step" else None
    batches = [make_batch(options.rows) for _ in range(8)]
    losses, times = [], []
    gpus = sorted({int(d) for d in devices}) if on_gpus else []
    for index in range(options.steps):
        begin = time.perf_counter()
        x, y = batches[index % len(batches)]
        if step is not None:
            loss = step(x, y)
        else:
            optimizer.zero_grad()
            with torch.autocast(home.type, torch.bfloat16):
                loss = criterion(net(x), y.to(home))
            loss.backward()
            optimizer.step()
        losses.append(gather(loss.detach()).float())
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        times.append(time.perf_counter() - begin)
    found = hashlib.sha256(torch.stack(losses).cpu().numpy().tobytes())
    for value in module.state_dict().values():
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {
        "sha256": found.hexdigest()[:16],
        "last_loss": losses[-1].item(),
        "engine": step.stats().engine if step is not None else net.engine_in_use,
        "ms_per_step": round(1000 * statistics.median(times[len(times) // 2 :]), 3),
        "peak_gib": [round(torch.cuda.max_memory_allocated(gpu) / 2**30, 3) for gpu in gpus],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", default=["0", "0,0"], help="lists such as 0 or 0,1")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["resnet18", "gpt2", "convnext_tiny"], choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        model, way, devices = options.one
        print(json.dumps(train(model, way, parse_devices(devices), options)))
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for the processes
    for model, way in itertools.product(options.models, options.ways):
        hashes = []
        for devices in options.devices:
            found = run_command([sys.executable, *sys.argv, "--one", model, way, devices], options.timeout)
            hashes.append(found.get("sha256"))
            print(json.dumps({"model": model, "way": way, "devices": devices, **found}), flush=True)
        verdict = "unknown" if None in hashes else "the same" if len(set(hashes)) == 1 else "NOT the same"
        print(f"{model}, {way}: {verdict}", flush=True)


if __name__ == "__main__":
    main()
