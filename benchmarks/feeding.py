"""What feeding costs: steps on batches that a Feeder brings from host memory, against steps on one that is there.

    python benchmarks/feeding.py [--models gpt2 resnet50] [--gpus 8] [--compile]
    python benchmarks/feeding.py --cpu 2 --models tiny --steps 3     # replicas on the CPU: whether it runs

Both take the same `TrainStep`, in turns, in one process. Loading costs nothing here: the loader hands out batches that
lie in (pageable) host memory, for all GPUs together; the Feeder pins them and copies each GPU's rows. Every round
begins with steps that don't count, so that no batch that was prepared in between counts for nothing. A line of JSON for
each model: the ratio is to be 1.02 at most.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import everygpu
from everygpu import tree
from everygpu.bench.report import describe_versions
from everygpu.bench.training import count_rows, find_training, list_batches, repeat_rows, split_batch
from everygpu.feed.tune import resize

PREFETCH = 2


class Loader:
    """Hands out the same few batches again and again, as a DataLoader that is never too slow."""

    def __init__(self, batches: list[Any], num_copies: int) -> None:
        self.batches = [resize(batch, count_rows(batch), 0) for _ in range(num_copies) for batch in batches]

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self.batches)


def synchronize(devices: list[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def time_steps(step: Callable[[], Any], devices: list[torch.device], num_steps: int) -> float:
    """Milliseconds of a step, after some that don't count; the devices are idle before and after."""
    for _ in range(PREFETCH + 2):
        step()
    synchronize(devices)
    begin = time.perf_counter()
    for _ in range(num_steps):
        step()
    synchronize(devices)
    return 1e3 * (time.perf_counter() - begin) / num_steps


def mib(batch: Any) -> float:
    """MiB of a batch's tensors."""
    return sum(x.nbytes for _, x in tree.leaves(batch, "") if isinstance(x, torch.Tensor)) / 2**20


def compare(name: str, devices: list[torch.device], options: argparse.Namespace) -> dict[str, Any]:
    """Measure both in turns; the ratio is the median over rounds."""
    torch.manual_seed(0)
    model, loss, optimizer, batch = find_training(name)
    batches = list_batches(batch if options.rows is None else resize(batch, options.rows, 0))
    whole = [repeat_rows(batch, len(devices)) for batch in batches]
    net = everygpu.DataParallel(model, devices, engine="compile" if options.compile else "auto")
    train = everygpu.TrainStep(net, loss, optimizer, precision="bf16", compile=options.compile)

    def learn(batch: Any) -> None:
        inputs, targets = split_batch(batch)
        train(inputs, *targets)

    there = itertools.cycle(list(everygpu.Feeder(whole, net)))
    with everygpu.Feeder(Loader(whole, options.batches), net, prefetch=PREFETCH) as feeder:
        feed = iter(feeder)
        ways = {"there": lambda: learn(next(there)), "fed": lambda: learn(next(feed))}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(options.rounds + 1):
            for way in ways if number % 2 else reversed(ways):
                times[way].append(time_steps(ways[way], devices, options.steps))
        waiting = feeder.report().wait_s
    there_ms, fed_ms = (times[way][1:] for way in ("there", "fed"))  # without the round that warms up
    ratios = sorted(fed / ready for ready, fed in zip(there_ms, fed_ms))
    return {
        "model": name,
        "num_devices": len(devices),
        "rows_per_device": statistics.mean(count_rows(batch) for batch in batches),
        "batch_mib": statistics.mean(mib(batch) for batch in whole),
        "there_ms": statistics.median(there_ms),
        "fed_ms": statistics.median(fed_ms),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[-1 - len(ratios) // 4],
        "waiting_ms": 1e3 * waiting,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2", "resnet50"], help="as `everygpu bench --model`")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--cpu", type=int, metavar="N", help="replicas on the CPU, instead of GPUs")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rows", type=int, help="for each device; the model's own by default")
    parser.add_argument("--batches", type=int, default=2, help="how many lie in host memory")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    gpus = [torch.device("cuda", i) for i in range(options.gpus)]
    devices = [torch.device("cpu")] * options.cpu if options.cpu else gpus
    if not devices:
        raise SystemExit("no GPU: --cpu 2 --models tiny shows on the CPU that everything runs")
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    print(json.dumps(describe_versions()), flush=True)
    for name in options.models:
        print(json.dumps(compare(name, devices, options)), flush=True)


if __name__ == "__main__":
    main()
