"""From every device's gradients to new parameters on all: one kernel, against NCCL's all-reduce and fused AdamW.

    python benchmarks/update.py [--gpus 2 4 8] [--millions 10 124 1500]

Every row runs in a process of its own. ``wire`` is the time in which each GPU's links carry what must come in: the
others' gradients for its share, and the parameters that others have updated, each once, at ``--gb-per-s``. As much
goes out meanwhile.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.cuda import nccl

from everygpu import ShardedOptimizer
from everygpu.bench.report import describe_machine
from everygpu.bench.timing import run_command, time_rounds
from everygpu.parallel.recording.device_graph import DeviceGraph
from everygpu.step.arena import Arena
from everygpu.step.fused import FusedUpdate, can_fuse
from everygpu.step.shards import Shards


def make_params(num: int, device: torch.device) -> list[nn.Parameter]:
    """Parameters as a model has them: matrices of a million elements with a bias each."""
    width = 1024
    pairs = [(torch.zeros(width, width, device=device), torch.zeros(width, device=device))] * max(1, num // width**2)
    return [nn.Parameter(t.clone().normal_()) for pair in pairs for t in pair]


def make_update(num: int, devices: list[torch.device]) -> tuple[FusedUpdate, set[int]]:
    params = make_params(num, devices[0])
    optimizer = torch.optim.AdamW(params, lr=1e-4)
    arena = Arena(params, devices)
    shards = Shards(optimizer, params, arena.plans, arena.chunks(arena.values), arena.chunks(arena.grads))
    ShardedOptimizer(optimizer, devices).attach(params, shards)
    if not can_fuse(optimizer, arena):
        raise SystemExit("these devices, or this machine, can't run the kernel")
    return FusedUpdate(optimizer, arena, shards), set(range(len(params)))


def ours(num: int, devices: list[torch.device]) -> Callable[[], Any]:
    """What TrainStep does after backward, in a step that isn't recorded."""
    fused, touched = make_update(num, devices)
    return lambda: fused.run(touched, factor=1.0, is_reduced=False)


def recorded(num: int, devices: list[torch.device]) -> Callable[[], Any]:
    """What TrainStep does in a recorded step: the kernels alone, launched as one CUDA graph."""
    fused, touched = make_update(num, devices)
    rows = fused.prepare(touched)
    fused.launch(rows, factor=1.0, is_reduced=False)  # compiles the kernels
    graph = DeviceGraph(devices)
    graph.record(lambda: fused.launch(rows, factor=1.0, is_reduced=False))
    return graph.replay


def in_turn(num: int, devices: list[torch.device]) -> Callable[[], Any]:
    """What TrainStep does where there is no kernel: reduce-scatter, torch's AdamW on the shares, all-gather."""
    params = make_params(num, devices[0])
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    arena = Arena(params, devices)
    shards = Shards(optimizer, params, arena.plans, arena.chunks(arena.values), arena.chunks(arena.grads))
    ShardedOptimizer(optimizer, devices).attach(params, shards)
    touched = set(range(len(params)))

    def step() -> None:
        arena.reduce()
        shards.step(optimizer.param_groups, touched)
        arena.hand_out()

    return step


def peer(num: int, devices: list[torch.device]) -> Callable[[], Any]:
    """What DistributedDataParallel comes down to: all-reduce, then the whole update on every device."""
    grads = [torch.zeros(num, device=d) for d in devices]
    optimizers = []
    for device, grad in zip(devices, grads):
        p = nn.Parameter(torch.zeros(num, device=device))
        p.grad = grad
        optimizers.append(torch.optim.AdamW([p], lr=1e-4, fused=True))

    def step() -> None:
        nccl.all_reduce(grads)
        for optimizer in optimizers:
            optimizer.step()

    return step


WAYS = {"kernel, recorded": recorded, "kernel": ours, "in turn": in_turn, "nccl + fused AdamW": peer}


def measure(way: str, num: int, count: int, rounds: int, steps: int) -> dict[str, Any]:
    devices = [torch.device("cuda", i) for i in range(count)]
    step = WAYS[way](num, devices)

    def wait() -> None:
        for d in devices:
            torch.cuda.synchronize(d)

    return time_rounds(step, wait, rounds, steps)


def run_apart(way: str, num: int, count: int, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", way, str(num), str(count)]
    command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    return run_command(command, options.timeout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[torch.cuda.device_count()])
    parser.add_argument("--millions", type=float, nargs="+", default=[10, 124, 1500])
    parser.add_argument("--gb-per-s", type=float, default=400, help="of one GPU's links, in each direction")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout", type=int, default=90)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("WAY", "NUM", "GPUS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, num, count = options.one
        print(json.dumps(measure(way, int(num), int(count), options.rounds, options.steps)), flush=True)
        os._exit(0)
    machine, rows = describe_machine(), []
    print(json.dumps(machine), flush=True)
    for count in options.gpus:
        for millions in options.millions:
            num = int(millions * 1e6)
            wire = 8 * num * (count - 1) / count / (options.gb_per_s * 1e9) * 1e3
            print(f"{count} GPUs, {millions:g}M parameters, wire {wire:.2f} ms", flush=True)
            for way in WAYS:
                rows.append({"way": way, "gpus": count, "params": num, "wire_ms": wire})
                rows[-1] |= run_apart(way, num, count, options)
                row = rows[-1]
                text = row.get("error") or f"{row['ms']:.3f} ms ({row['ms_min']:.3f} to {row['ms_max']:.3f})"
                print(f"  {way:20} {text}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
