"""Measure saving and loading a state of 1 GB against torch.save and torch.load, in turns, in one run.

    python -m benchmarks.checkpoints                    # on the CPU, in a temporary directory
    python -m benchmarks.checkpoints --device cuda
    python -m benchmarks.checkpoints --directory /data  # on another disk

The state is a model and its AdamW: a third of the bytes each in weights and two moments. Every round saves
and loads with each way once, new files every time, after the disk has come to rest. Times are medians;
memory is what the process's resident set grows by at its highest.
"""

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import everygpu
from everygpu.bench.report import describe_machine


class Run:
    """A model of many layers, and an optimizer with a state."""

    def __init__(self, num_bytes: int, device: str) -> None:
        width = 1024
        num_layers = max(1, num_bytes // 3 // (4 * width * width))
        self.model = nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(num_layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.device = device

    def num_bytes(self) -> int:
        moments = [t for state in self.optimizer.state.values() for t in state.values()]
        return sum(t.nbytes for t in [*self.model.state_dict().values(), *moments])

    def torch_save(self, path: Path) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def torch_save_synced(self, path: Path) -> None:
        self.torch_save(path)
        with open(path, "r+b") as file:
            os.fsync(file.fileno())

    def torch_load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def save(self, path: Path) -> None:
        everygpu.save(path, model=self.model, optimizer=self.optimizer)

    def load(self, path: Path, verify: bool = True) -> None:
        everygpu.load(path, model=self.model, optimizer=self.optimizer, verify=verify)

    def synchronize(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


def seconds(work: Callable[[], object], run: Run) -> float:
    """Time a piece of work, the GPU's part too."""
    run.synchronize()
    begin = time.perf_counter()
    work()
    run.synchronize()
    return time.perf_counter() - begin


def peak_growth_bytes(work: Callable[[], object]) -> int:
    """Watch the anonymous memory of this process while it works; return how far it grew."""
    gc.collect()
    before, peak, is_over = _anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.001):
            peak = max(peak, _anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    is_over.set()
    watcher.join()
    return max(0, max(peak, _anonymous_bytes()) - before)


def _anonymous_bytes() -> int:
    """Source: ``RssAnon`` and ``RssShmem`` in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


Times = dict[str, list[float]]
"""Seconds of each round, by what was done."""


def note(times: Times, name: str, work: Callable[[], object], run: Run) -> None:
    os.sync()  # what the last one left for later is not this one's
    times.setdefault(name, []).append(seconds(work, run))


def measure(run: Run, root: Path, num_rounds: int) -> Times:
    """Save and load in turn; each file is removed before the next, so that all find the same memory for pages."""
    times: Times = {}
    for _ in range(num_rounds + 1):
        note(times, "torch.save", lambda: run.torch_save(root / "a"), run)
        note(times, "torch.load", lambda: run.torch_load(root / "a"), run)
        (root / "a").unlink()
        note(times, "everygpu.save", lambda: run.save(root / "c"), run)
        note(times, "everygpu.load", lambda: run.load(root / "c"), run)
        note(times, "everygpu.load, verify=False", lambda: run.load(root / "c", verify=False), run)
        shutil.rmtree(root / "c")
        note(times, "torch.save + fsync", lambda: run.torch_save_synced(root / "b"), run)
        (root / "b").unlink()
    return {name: values[1:] for name, values in times.items()}  # without the round that warms up


def measure_background(run: Run, root: Path, num_rounds: int) -> Times:
    """Save in the background, and for comparison not, in turn."""
    times: Times = {}
    parts = {"model": run.model, "optimizer": run.optimizer}
    checkpoints = everygpu.CheckpointManager(root / "async", keep=1, asynchronous=True, **parts)
    for step in range(num_rounds + 1):
        save = partial(checkpoints.save, step)
        note(times, "synchronous save", lambda: run.save(root / "c"), run)
        shutil.rmtree(root / "c")
        note(times, "asynchronous save returns", save, run)
        note(times, "asynchronous save is written", checkpoints.wait, run)
        shutil.rmtree(root / "async")
    checkpoints.close()
    return {name: values[1:] for name, values in times.items()}


def measure_memory(run: Run, root: Path) -> dict[str, int]:
    """Return the growth of memory in bytes during a save of each kind."""
    parts = {"model": run.model, "optimizer": run.optimizer}
    checkpoints = everygpu.CheckpointManager(root / "memory", keep=1, asynchronous=True, **parts)

    def save_in_background() -> None:
        checkpoints.save(1)
        checkpoints.wait()

    growth = {
        "torch.save": peak_growth_bytes(lambda: run.torch_save(root / "a")),
        "everygpu.save": peak_growth_bytes(lambda: run.save(root / "c")),
        "asynchronous save": peak_growth_bytes(save_in_background),
    }
    checkpoints.close()
    return growth


def report(times: dict[str, list[float]], growth: dict[str, int], num_bytes: int) -> None:
    medians = {name: statistics.median(values) for name, values in times.items()}
    print("| | median s | least to most |\n|---|---|---|")
    for name, values in times.items():
        print(f"| {name} | {medians[name]:.3f} | {min(values):.3f} to {max(values):.3f} |")
    print()
    for name, other in [
        ("everygpu.save", "torch.save"),
        ("everygpu.save", "torch.save + fsync"),
        ("everygpu.load", "torch.load"),
        ("everygpu.load, verify=False", "torch.load"),
        ("asynchronous save returns", "synchronous save"),
    ]:
        ratios = [a / b for a, b in zip(times[name], times[other])]
        ratio = medians[name] / medians[other]
        print(f"{name} / {other}: {ratio:.3f} of medians, {min(ratios):.3f} to {max(ratios):.3f} in rounds")
    for name, grown in growth.items():
        print(f"{name}: {grown / 2**20:.0f} MiB more memory, {grown / num_bytes:.2f} of the state")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=10**9)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--directory", type=Path, help="where to write; by default the system's temporary directory")
    options = parser.parse_args()
    run = Run(options.bytes, options.device)
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        growth = measure_memory(run, Path(root))
        times = measure(run, Path(root), options.rounds)
        times |= measure_background(run, Path(root), options.rounds)
    print(f"state of {run.num_bytes() / 1e9:.2f} GB on {options.device}, {options.rounds} rounds")
    report(times, growth, run.num_bytes())
    print(f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs, ours included")
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items() if value))


if __name__ == "__main__":
    main()
