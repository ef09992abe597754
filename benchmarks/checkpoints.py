"""Time saving and loading of a state of 2 GB, beside torch.save, safetensors and torch.distributed.checkpoint.

    python -m benchmarks.checkpoints                    # on the CPU, in a temporary directory
    python -m benchmarks.checkpoints --device cuda
    python -m benchmarks.checkpoints --directory /data  # on another disk

The state is a model and its AdamW: a third of the bytes each in weights and two moments. Every round saves and loads
with each way once, new files every time, after the disk has come to rest; what is saved is synced to the disk, by each.
"""

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import everygpu
from everygpu.bench.report import describe_versions

Work = Callable[[Path], object]


class State:
    """A model of many layers, an optimizer with a state, and the ways to save and load both."""

    def __init__(self, num_bytes: int, device: str) -> None:
        width = 1024
        num_layers = max(1, num_bytes // 3 // (4 * width * width))
        self.device = device
        self.model = nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(num_layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.parts = {"model": self.model, "optimizer": self.optimizer}
        self.ways: dict[str, tuple[Work, Work]] = {
            "everygpu": (self._save, lambda path: everygpu.load(path, **self.parts)),
            "everygpu, verify=False": (self._save, lambda path: everygpu.load(path, **self.parts, verify=False)),
            "torch.save": (lambda path: torch.save(self._dicts(), path), self._load_torch),
            "safetensors": (lambda path: save_file(self._flat(), path), self._load_safetensors),
            "DCP": (lambda path: dcp.save(self._dicts(), checkpoint_id=path, no_dist=True), self._load_dcp),
        }

    def _save(self, path: Path) -> None:
        everygpu.save(path, **self.parts)

    def _dicts(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def _flat(self) -> dict[str, Tensor]:
        moments = self.optimizer.state_dict()["state"]
        return self.model.state_dict() | {f"{i}.{k}": v for i, state in moments.items() for k, v in state.items()}

    def _take(self, dicts: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(dicts[name])

    def _load_torch(self, path: Path) -> None:
        self._take(torch.load(path, weights_only=True, map_location=self.device))

    @torch.no_grad()
    def _load_safetensors(self, path: Path) -> None:
        found = load_file(path, device=self.device)
        for name, tensor in self._flat().items():
            tensor.copy_(found[name])

    def _load_dcp(self, path: Path) -> None:
        dicts = self._dicts()
        dcp.load(dicts, checkpoint_id=path, no_dist=True)
        self._take(dicts)


def seconds(work: Callable[[], object]) -> float:
    """Time a piece of work, the GPU's part too, after the disk has come to rest."""
    gc.collect()
    os.sync()
    begin = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def save_synced(save: Work, path: Path) -> None:
    save(path)
    if path.is_file():  # directories are synced by what writes them
        with open(path, "r+b") as file:
            os.fsync(file.fileno())


def measure(state: State, root: Path, num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round; every way finds the same memory for pages of files."""
    times: dict[str, list[float]] = {}
    manager = everygpu.CheckpointManager(root / "run", keep=1, asynchronous=True, **state.parts)
    path = root / "checkpoint"
    for number in range(num_rounds + 1):
        found = {}
        for name, (save, load) in state.ways.items():
            found[f"save, {name}"] = seconds(lambda save=save: save_synced(save, path))  # type: ignore[misc]
            found[f"load, {name}"] = seconds(lambda load=load: load(path))  # type: ignore[misc]
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        found["a call to save in the background"] = seconds(lambda number=number: manager.save(number))  # type: ignore[misc]
        manager.wait()
        for name, value in found.items():
            times.setdefault(name, []).extend([value] * (number > 0))  # without the round that warms up
    manager.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=2 * 10**9)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--directory", type=Path, help="where to write; by default the system's temporary directory")
    options = parser.parse_args()
    state = State(options.bytes, options.device)
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        times = measure(state, Path(root), options.rounds)
    print("| | median s | least to most |\n|---|---|---|")
    for name, values in times.items():
        print(f"| {name} | {statistics.median(values):.3f} | {min(values):.3f} to {max(values):.3f} |")
    print(f"{options.rounds} rounds; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs, ours included; ", end="")
    print(", ".join(f"{name} {value}" for name, value in describe_versions().items() if value))


if __name__ == "__main__":
    main()
