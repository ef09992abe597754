"""Train in helper processes for long, and kill them: memory and files stay flat, deaths are errors, nothing is left.

python benchmarks/helpers.py [--steps 10000] [--kills 20] [--replicas 2]   # all GPUs, or so many replicas on the CPU
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import everygpu
from everygpu.bench.report import describe_machine
from everygpu.errors import WorkerError

SHARED = Path("/dev/shm")
LIMIT_S = 5.0
_MODULE = "everygpu.parallel.engines.processes"
_LONGEST_S = 60.0
_LONGEST_WAIT_S = 0.1  # tens of steps, before the signal comes
_FLAT_BYTES = 64 * 2**20


class Training:
    """A small model and its optimizer, a step at a time; every seventh batch is smaller."""

    def __init__(self, num_replicas: int | None) -> None:
        everygpu.seed_all(0)
        module = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
        used = ["cpu"] * num_replicas if num_replicas else None
        self.model = everygpu.DataParallel(module, used, engine="processes")
        self.device = self.model.src_device_obj
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self._x = torch.randn(64, 16, device=self.device)
        self._y = torch.randint(0, 10, (64,), device=self.device)
        self._num_steps = 0

    def step(self) -> torch.Tensor:
        self._num_steps += 1
        rows = 64 if self._num_steps % 7 else 61
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self._x[:rows]), self._y[:rows])
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def find_helpers(pid: int | str = "self") -> list[int]:
    """Return the ids of the helpers that a process has started and that run."""
    main = Path("/proc", str(pid)).resolve().name
    return sorted(helper for helper, parent in _all_helpers() if parent == main)


def _all_helpers() -> Iterator[tuple[int, str]]:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if _MODULE in path.joinpath("cmdline").read_text():
                yield int(path.name), path.joinpath("stat").read_text().rpartition(")")[2].split()[1]
        except OSError:  # it has just ended
            continue


def read_usage(pid: int | str) -> tuple[int, int, int]:
    """Return a process's own memory in bytes, its open files and its threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return int(status["RssAnon"].split()[0]) * 1024, files, int(status["Threads"])


def read_all_usage(training: Training) -> dict[str, list[int]]:
    """Return memory, files and threads of this process and of each helper, and the memory used on each GPU."""
    processes = [read_usage(pid) for pid in ("self", *find_helpers())]
    names = ("bytes", "files", "threads")
    found = {name: [usage[i] for usage in processes] for i, name in enumerate(names)}
    gpus = [d for d in training.model.replica_devices if d.type == "cuda"]
    found["allocated here"] = [torch.cuda.memory_allocated(d) for d in gpus]
    found["used on GPUs"] = [total - free for free, total in map(torch.cuda.mem_get_info, gpus)]
    return found


def train(training: Training, num_steps: int) -> list[str]:
    """Train; return what isn't as it should be."""
    warm: dict[str, list[int]] = {}
    start = time.perf_counter()
    for i in range(num_steps):
        loss = training.step()
        if i == num_steps // 10:
            warm = read_all_usage(training)
        if (i + 1) % max(1, num_steps // 5) == 0:
            rate = (i + 1) / (time.perf_counter() - start)
            usage = read_all_usage(training)
            print(f"step {i + 1:6}  loss {loss.item():.5f}  {rate:6.1f} steps/s  {usage}", flush=True)
    now = read_all_usage(training)
    growth = {k: [a - b for a, b in zip(now[k], before)] for k, before in warm.items()}
    print(f"growth since step {num_steps // 10}, here and in helpers: {growth}")
    limits = {"files": 0, "threads": 0}
    found = [f"{name} grew by {g}" for name, g in growth.items() if max(g, default=0) > limits.get(name, _FLAT_BYTES)]
    return found if torch.isfinite(loss) else [*found, "the loss is not finite"]


def kill_helper(training: Training, chance: random.Random) -> tuple[float, str]:
    """Kill a helper at a random moment; return the seconds until the error, and what is wrong, if anything."""
    training.step()  # with helpers that have started
    pid = chance.choice(find_helpers())
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.perf_counter())
        os.kill(pid, signal.SIGKILL)  # not reaped before it has been killed

    timer = threading.Timer(chance.uniform(0, _LONGEST_WAIT_S), kill)
    timer.start()
    deadline, raised = time.perf_counter() + _LONGEST_S, ""
    while not raised and time.perf_counter() < deadline:
        try:
            training.step()
        except WorkerError as error:
            raised = str(error)
    timer.join()
    seconds = time.perf_counter() - killed[0]
    wrong = [] if "SIGKILL" in raised else [raised or "no error"]
    wrong += ["a zombie"] if Path(f"/proc/{pid}").exists() else []
    return seconds, ", ".join([*wrong, *_left_in_memory([pid])])


def kill_main(arguments: list[str], chance: random.Random) -> tuple[float, str]:
    """Kill a process that trains; return the seconds until its helpers have ended, and what is left."""
    main = subprocess.Popen([sys.executable, __file__, "--victim", *arguments], stdout=subprocess.PIPE, text=True)
    with main:
        line = main.stdout.readline() if main.stdout else ""
        helpers = find_helpers(main.pid)
        time.sleep(chance.uniform(0, _LONGEST_WAIT_S))
        main.kill()
        main.wait()
    start = time.perf_counter()
    while (left := [p for p in helpers if _runs(p)]) and time.perf_counter() - start < _LONGEST_S:
        time.sleep(0.005)
    seconds = time.perf_counter() - start
    wrong = [] if line and helpers else ["it never trained"]
    wrong += [f"process {p}" for p in left]
    return seconds, ", ".join([*wrong, *_left_in_memory([main.pid, *helpers])])


def _runs(pid: int) -> bool:
    """Tell whether a process runs: one without a parent stays until the system takes note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _left_in_memory(pids: list[int]) -> list[str]:
    return [path.name for pid in pids for path in SHARED.glob(f"torch_{pid}_*")]


def report(name: str, outcomes: list[tuple[float, str]]) -> list[str]:
    """Print a line of the table; return what is wrong."""
    seconds = sorted(s for s, _ in outcomes)
    wrong = [w for _, w in outcomes if w]
    middle, most = seconds[len(seconds) // 2], seconds[-1]
    print(f"| {name} | {len(outcomes)} | {middle:.3f} | {most:.3f} | {'; '.join(wrong) or 'none'} |", flush=True)
    return wrong + ([f"{name}: {most:.1f} s"] if most > LIMIT_S else [])


def repeat(function: Callable[[], tuple[float, str]], times: int) -> list[tuple[float, str]]:
    return [function() for _ in range(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=0, help="of helpers, then of main processes")
    parser.add_argument("--replicas", type=int, help="replicas on the CPU, instead of all GPUs")
    parser.add_argument("--victim", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    training = Training(options.replicas)
    if options.victim:
        training.step()
        print("trains", flush=True)
        while True:
            training.step()
    print(json.dumps(describe_machine()))
    wrong = train(training, options.steps) if options.steps else []
    if options.kills:
        chance = random.Random(0)
        print("\n| killed | times | s until error or end, median | most | left |\n|---|---|---|---|---|")
        wrong += report("helper", repeat(lambda: kill_helper(training, chance), options.kills))
        own = [f"--replicas={options.replicas}"] if options.replicas else []
        wrong += report("main process", repeat(lambda: kill_main(own, chance), options.kills))
    if wrong:
        raise SystemExit("; ".join(wrong))


if __name__ == "__main__":
    main()
