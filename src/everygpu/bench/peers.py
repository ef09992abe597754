"""Ourselves and the peers, training the same models in one run: steps, samples, memory, start-up.

Every row runs in a process of its own and prints its result as it comes.

    python benchmarks/peers.py [--gpus 8] [--models gpt2 resnet50 resnet18] [--peers single dp ddp ours …]
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import describe_machine
from timing import run_command, time_rounds
from torch import nn
from workloads import WORKLOADS, Workload

Step = Callable[[], Any]


def autocast() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


def plain_step(net: Callable[..., Any], parameters: Any, work: Workload, rows: int, device: torch.device) -> Step:
    """The loop every PyTorch script has."""
    optimizer = work.optimizer(parameters)
    x, y = work.batch(rows, device)

    def step() -> Any:
        optimizer.zero_grad()
        with autocast():
            loss = work.loss(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def single(work: Workload, num_gpus: int, *, compiled: bool = False) -> Step:
    net = work.build().cuda()
    return plain_step(
        torch.compile(net) if compiled else net, net.parameters(), work, work.rows_per_gpu, torch.device("cuda", 0)
    )


def single_graph(work: Workload, num_gpus: int) -> Step:
    """The whole step captured: what one GPU can do without waiting for Python."""
    net = work.build().cuda()
    optimizer = work.optimizer(net.parameters())
    x, y = work.batch(work.rows_per_gpu, torch.device("cuda", 0))

    def step() -> Any:
        optimizer.zero_grad(set_to_none=False)
        with autocast():
            loss = work.loss(net(x), y)
        loss.backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def data_parallel(work: Workload, num_gpus: int) -> Step:
    net = nn.DataParallel(work.build().cuda(), list(range(num_gpus)))
    return plain_step(net, net.parameters(), work, work.rows_per_gpu * num_gpus, torch.device("cuda", 0))


def ours(work: Workload, num_gpus: int, **options: Any) -> Step:
    import everygpu

    net = everygpu.DataParallel(work.build(), list(range(num_gpus)), **options)
    return plain_step(net, net.parameters(), work, work.rows_per_gpu * num_gpus, torch.device("cuda", 0))


def train_step(work: Workload, num_gpus: int, **options: Any) -> Step:
    import everygpu

    devices = list(range(num_gpus))
    net = everygpu.DataParallel(work.build(), devices, engine="compile" if options.get("compile") else "auto")
    step = everygpu.TrainStep(net, work.loss, work.optimizer(net.parameters()), precision="bf16", **options)
    x, y = work.batch(work.rows_per_gpu * num_gpus, torch.device("cuda", 0))
    return lambda: step(x, y)


def ddp_worker(rank: int, name: str, num_gpus: int, rounds: int, steps: int, compiled: bool, results: Any) -> None:
    import torch.distributed as dist

    start = time.perf_counter()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK=str(rank), WORLD_SIZE=str(num_gpus))
    torch.cuda.set_device(rank)
    prepare()
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    work = WORKLOADS[name]
    net = nn.parallel.DistributedDataParallel(work.build().cuda(), [rank], gradient_as_bucket_view=True)
    call = torch.compile(net) if compiled else net
    step = plain_step(call, net.parameters(), work, work.rows_per_gpu, torch.device("cuda", rank))

    def wait() -> None:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()

    outcome = measure(step, wait, rounds, steps, start)
    peaks = [0.0] * num_gpus
    dist.all_gather_object(peaks, torch.cuda.max_memory_allocated() / 2**30)
    if rank == 0:
        results.put(outcome | {"peak_gib": [round(p, 2) for p in peaks]})
    dist.destroy_process_group()


def ddp(name: str, num_gpus: int, rounds: int, steps: int, compiled: bool) -> dict[str, Any]:
    import torch.multiprocessing as mp

    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(ddp_worker, (name, num_gpus, rounds, steps, compiled, results), num_gpus)
    outcome: dict[str, Any] = results.get()
    return outcome


STEPS: dict[str, Callable[[Workload, int], Step]] = {
    "single": single,
    "single_compiled": lambda work, n: single(work, n, compiled=True),
    "single_graph": single_graph,
    "dp": data_parallel,
    "ours": ours,
    "ours_compiled": lambda work, n: ours(work, n, engine="compile"),
    "step": train_step,
    "step_compiled": lambda work, n: train_step(work, n, compile=True),
}
PEERS = ["single", "single_compiled", "single_graph", "dp", "ddp", "ddp_compiled", "ours", "step"]


def prepare() -> None:
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)


def measure(step: Step, wait: Callable[[], None], rounds: int, steps: int, start: float) -> dict[str, Any]:
    """Time rounds of steps; the start-up ends with the third step."""
    for _ in range(3):
        step()
    wait()
    startup = time.perf_counter() - start
    return time_rounds(step, wait, rounds, steps) | {"startup_s": round(startup, 1)}


def run_one(peer: str, name: str, num_gpus: int, rounds: int, steps: int) -> dict[str, Any]:
    work, used = WORKLOADS[name], 1 if peer.startswith("single") else num_gpus
    if peer.startswith("ddp"):
        row = ddp(name, num_gpus, rounds, steps, peer == "ddp_compiled")
    else:
        start = time.perf_counter()
        prepare()

        def wait() -> None:
            for i in range(used):
                torch.cuda.synchronize(i)

        row = measure(STEPS[peer](work, num_gpus), wait, rounds, steps, start)
        row["peak_gib"] = [round(torch.cuda.max_memory_allocated(i) / 2**30, 2) for i in range(used)]
    return row | {"samples_per_s": round(1e3 * work.rows_per_gpu * used / row["ms"], 1), "gpus": used}


def run_apart(peer: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one row in a process of its own; a hang or a failure is its result."""
    command = [sys.executable, __file__, "--one", peer, name, "--gpus", str(options.gpus)]
    command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    return run_command(command, options.timeout)


def describe(row: dict[str, Any]) -> str:
    head = f"{row['model']:9} {row['peer']:15}"
    if "error" in row:
        return f"{head} {row['error']}"
    peaks = row["peak_gib"]
    times = f"{row['ms']:9.2f} ms ({row['ms_min']:.2f} to {row['ms_max']:.2f})"
    memory = f"peak {max(peaks):6.2f} GiB, max/min {max(peaks) / max(min(peaks), 0.01):5.2f}"
    return f"{head} {times}  {row['samples_per_s']:10,.0f}/s  {memory}  start-up {row['startup_s']:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--peers", nargs="+", default=PEERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout", type=int, default=180)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("PEER", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(*options.one, options.gpus, options.rounds, options.steps)), flush=True)
        os._exit(0)  # threads of a failed peer must not keep the process
    machine = describe_machine()
    print(json.dumps(machine), flush=True)
    rows = []
    for name in options.models:
        for peer in options.peers:
            rows.append({"model": name, "peer": peer} | run_apart(peer, name, options))
            print(describe(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
