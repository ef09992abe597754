"""A run that is killed and resumed, on other workers and replicas too, is the run that was not."""

import contextlib
import os
import random
import signal
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everygpu
from tests.faults.inject import fork

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
NUM_SAMPLES, NUM_EPOCHS = 48, 3
LAST_STEP = 8 * NUM_EPOCHS
Line = tuple[tuple[int, ...], str]
"""The samples of a step, and its loss to the last bit."""


class Training:
    """Dropout, BatchNorm, AdamW, a scheduler, a scaler, and a shuffled DataLoader."""

    def __init__(self, directory: Path, num_replicas: int, num_workers: int, seed: int = 1) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.model = everygpu.DataParallel(net, ["cpu"] * num_replicas)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, LAST_STEP)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        samples = torch.linspace(-1, 1, NUM_SAMPLES * 3).reshape(-1, 3)
        dataset = TensorDataset(torch.arange(NUM_SAMPLES), samples)
        loader = DataLoader(dataset, 6, shuffle=True, num_workers=num_workers)
        self.data = everygpu.Feeder(loader, "cpu", prefetch=0)
        self.checkpoints = everygpu.CheckpointManager(directory, keep=2, every=3, **self.parts())
        self.step = 0

    def parts(self) -> dict[str, object]:
        names = ("model", "optimizer", "scheduler", "scaler", "data")
        return {name: getattr(self, name) for name in names}

    def resume(self) -> None:
        self.step = self.checkpoints.resume()

    def run(self, log: list[tuple[int, Line]] | Path, up_to: int = LAST_STEP) -> None:
        while self.data.epoch < NUM_EPOCHS:
            for numbers, samples in self.data:
                loss = self.train(samples)
                self.step += 1
                write(log, self.step, (tuple(numbers.tolist()), loss))
                self.checkpoints.save(self.step)
                if self.step == up_to:
                    return

    def train(self, samples: torch.Tensor) -> str:
        self.optimizer.zero_grad()
        loss = (self.model(samples) - samples.sum(1, keepdim=True)).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss.item().hex()


def write(log: list[tuple[int, Line]] | Path, step: int, line: Line) -> None:
    if isinstance(log, list):
        log.append((step, line))
    else:
        with open(log, "a") as file:
            file.write(f"{step};{','.join(map(str, line[0]))};{line[1]}\n")


def read(log: Path) -> list[tuple[int, Line]]:
    rows = [line.split(";") for line in log.read_text().splitlines()]
    return [(int(step), (tuple(map(int, numbers.split(","))), loss)) for step, numbers, loss in rows]


def uninterrupted(directory: Path, num_replicas: int, up_to: int = LAST_STEP) -> dict[int, Line]:
    log: list[tuple[int, Line]] = []
    Training(directory, num_replicas, num_workers=0).run(log, up_to)
    return dict(log)


def go_on(directory: Path, log: Path, num_replicas: int, num_workers: int) -> None:
    """Begin the run, or resume it, and go on to its end."""
    seed = 50 if list(directory.glob("step-*")) else 1
    training = Training(directory, num_replicas, num_workers, seed)
    training.resume()
    training.run(log)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_killed_again_and_again(tmp_path: Path, num_replicas: int) -> None:
    # In a process of its own too: how many threads compute decides the last bits.
    assert end_of(fork(partial(go_on, tmp_path / "whole", tmp_path / "expected", num_replicas, 0))) == 0
    expected = dict(read(tmp_path / "expected"))
    assert len({loss for _, loss in expected.values()}) == len(expected) == LAST_STEP
    chance, kills = random.Random(0), 0
    for attempt in range(60):
        child = fork(partial(go_on, tmp_path / "killed", tmp_path / "log", num_replicas, attempt % 2))
        if kills < 6:
            wait_for_a_line(tmp_path / "log", child)
            time.sleep(chance.uniform(0, 0.01))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # with its DataLoader's workers, as when a job is cancelled
        if end_of(child) == 0:
            break
        kills += 1
    else:
        raise AssertionError("the run never came to its end")
    seen = defaultdict(set)
    for step, line in read(tmp_path / "log"):
        seen[step].add(line)
    assert kills >= 3, "hardly a run was killed: the test shows nothing"
    assert seen == {step: {line} for step, line in expected.items()}


def wait_for_a_line(log: Path, child: int) -> None:
    """Wait until a run has gone on by a step, however fast this machine is today; or has ended."""
    before = log.stat().st_size if log.exists() else 0
    while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if log.exists() and log.stat().st_size > before:
            return
        time.sleep(0.001)


def end_of(child: int) -> int:
    """Wait for a process; return its status."""
    return os.waitpid(child, 0)[1]


REPLICAS, WORKERS = (1, 3), (0, 2)
CELLS = [(replicas, workers) for replicas in REPLICAS for workers in WORKERS]


@pytest.mark.parametrize(
    ("num_replicas", "num_workers"), CELLS, ids=[f"from {r} replicas, {w} workers" for r, w in CELLS]
)
def test_resumed_on_other_replicas_and_workers(tmp_path: Path, num_replicas: int, num_workers: int) -> None:
    expected = uninterrupted(tmp_path / "whole", num_replicas, up_to=9)
    interrupted = Training(tmp_path / "run", num_replicas, num_workers)
    interrupted.run([], up_to=6)
    for replicas, workers in CELLS:
        resumed = Training(tmp_path / "run", replicas, workers, seed=7)
        resumed.resume()
        assert resumed.step == 6
        resumed.checkpoints = everygpu.CheckpointManager(tmp_path / "other", every=1000, **resumed.parts())
        log: list[tuple[int, Line]] = []
        resumed.run(log, up_to=9)
        samples = {step: line[0] for step, line in log}
        assert samples == {step: expected[step][0] for step in (7, 8, 9)}, f"{replicas} replicas, {workers} workers"
        if replicas == num_replicas:
            assert dict(log) == {step: expected[step] for step in (7, 8, 9)}, f"{workers} workers"
