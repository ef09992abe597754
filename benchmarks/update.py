"""From every device's gradients to new parameters on all: one kernel, against NCCL's all-reduce and fused AdamW.

    python benchmarks/update.py [--gpus 2 4 8] [--millions 10 124 1500] [--dtypes float32 bfloat16]

Every row runs in a process of its own. ``wire`` is the time in which each GPU's links carry what must come in: the
others' gradients for its share, and the parameters that others have updated, each once, at ``--gb-per-s``. As much
goes out meanwhile.
"""

import argparse
import itertools
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
from everygpu.parallel.cuda_graphs.multi_gpu_graph import MultiGpuGraph
from everygpu.step.flat_parameters import FlatParameters
from everygpu.step.fused import FusedUpdate, make_fused
from everygpu.step.shards import Shards


def make_params(num: int, device: torch.device, dtype: torch.dtype) -> list[nn.Parameter]:
    """Parameters as a model has them: matrices of a million elements with a bias each."""
    width = 1024
    shapes = [(width, width), (width,)] * max(1, num // width**2)
    return [nn.Parameter(torch.empty(shape, device=device, dtype=dtype).normal_()) for shape in shapes]


def make_update(num: int, devices: list[torch.device], dtype: torch.dtype) -> tuple[FusedUpdate, set[int]]:
    params = make_params(num, devices[0], dtype)
    optimizer = torch.optim.AdamW(params, lr=1e-4)
    flat_params = FlatParameters(params, devices)
    shards = Shards(
        optimizer,
        params,
        flat_params.plans,
        flat_params.chunks(flat_params.values),
        flat_params.chunks(flat_params.grads),
    )
    ShardedOptimizer(optimizer, devices).attach(params, shards)
    fused = make_fused(optimizer, flat_params, shards)
    if fused is None:
        raise SystemExit("these devices, or this machine, can't run the kernel")
    return fused, set(range(len(params)))


def ours(num: int, devices: list[torch.device], dtype: torch.dtype) -> Callable[[], Any]:
    """What TrainStep does after backward, in a step that isn't recorded."""
    fused, touched = make_update(num, devices, dtype)
    return lambda: fused.run(touched, factor=1.0, losses=None)


def recorded(num: int, devices: list[torch.device], dtype: torch.dtype) -> Callable[[], Any]:
    """What TrainStep does in a recorded step: the kernels alone, launched as one CUDA graph."""
    fused, touched = make_update(num, devices, dtype)
    rows = fused.prepare(touched)
    fused.launch(rows, factor=1.0, is_reduced=False)  # compiles the kernels
    graph = MultiGpuGraph(devices)
    graph.record(lambda: fused.launch(rows, factor=1.0, is_reduced=False))
    return graph.replay


def in_turn(num: int, devices: list[torch.device], dtype: torch.dtype) -> Callable[[], Any]:
    """What TrainStep does where there is no kernel: reduce-scatter, torch's AdamW on the shares, all-gather."""
    params = make_params(num, devices[0], dtype)
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    flat_params = FlatParameters(params, devices)
    shards = Shards(
        optimizer,
        params,
        flat_params.plans,
        flat_params.chunks(flat_params.values),
        flat_params.chunks(flat_params.grads),
    )
    ShardedOptimizer(optimizer, devices).attach(params, shards)
    touched = set(range(len(params)))

    def step() -> None:
        flat_params.reduce()
        shards.step(optimizer.param_groups, touched)
        flat_params.all_gather_params()

    return step


def peer(num: int, devices: list[torch.device], dtype: torch.dtype) -> Callable[[], Any]:
    """What DistributedDataParallel comes down to: all-reduce, then the whole update on every device."""
    grads = [torch.zeros(num, device=d, dtype=dtype) for d in devices]
    optimizers = []
    for device, grad in zip(devices, grads):
        p = nn.Parameter(torch.zeros(num, device=device, dtype=dtype))
        p.grad = grad
        optimizers.append(torch.optim.AdamW([p], lr=1e-4, fused=True))

    def step() -> None:
        nccl.all_reduce(grads)
        for optimizer in optimizers:
            optimizer.step()

    return step


WAYS = {"kernel, recorded": recorded, "kernel": ours, "in turn": in_turn, "nccl + fused AdamW": peer}


def measure(way: str, num: int, count: int, dtype: str, rounds: int, steps: int) -> dict[str, Any]:
    devices = [torch.device("cuda", i) for i in range(count)]
    step = WAYS[way](num, devices, getattr(torch, dtype))

    def wait() -> None:
        for d in devices:
            torch.cuda.synchronize(d)

    return time_rounds(step, wait, rounds, steps)


def run_apart(way: str, num: int, count: int, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", way, str(num), str(count), dtype]
    command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    return run_command(command, options.timeout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[torch.cuda.device_count()])
    parser.add_argument("--millions", type=float, nargs="+", default=[10, 124, 1500])
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--gb-per-s", type=float, default=400, help="of one GPU's links, in each direction")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout", type=int, default=90)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=4, metavar=("WAY", "NUM", "GPUS", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, num, count, dtype = options.one
        print(json.dumps(measure(way, int(num), int(count), dtype, options.rounds, options.steps)), flush=True)
        os._exit(0)
    machine, rows = describe_machine(), []
    print(json.dumps(machine), flush=True)
    for count, millions, dtype in itertools.product(options.gpus, options.millions, options.dtypes):
        num = int(millions * 1e6)
        num_bytes = 2 * getattr(torch, dtype).itemsize * num * (count - 1) / count
        wire = num_bytes / (options.gb_per_s * 1e9) * 1e3
        print(f"{count} GPUs, {millions:g}M parameters, {dtype}, wire {wire:.2f} ms", flush=True)
        for way in WAYS:
            rows.append({"way": way, "gpus": count, "params": num, "dtype": dtype, "wire_ms": wire})
            rows[-1] |= run_apart(way, num, count, dtype, options)
            row = rows[-1]
            text = row.get("error") or f"{row['ms']:.3f} ms ({row['ms_min']:.3f} to {row['ms_max']:.3f})"
            print(f"  {way:20} {text}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
