"""Training with everygpu."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.fault_soak.setup import Setup
from benchmarks.fault_soak.task import DATA_TIMEOUT_S, KEEP, SAVE_EVERY, Net, Samples, make_loader, make_optimizer
from torch import Tensor
from torch.nn import functional as F

import everygpu


class EveryGPU:
    """DataParallel or TrainStep, a Feeder, and a CheckpointManager."""

    def __init__(self, setup: Setup, root: Path, seed: int) -> None:
        everygpu.seed_all(seed if everygpu.CheckpointManager(root).latest() else 0)
        self.net, self.samples = Net(), Samples()
        self.model = everygpu.DataParallel(self.net, ["cpu"] * 2, engine=setup.engine)
        self.optimizer = make_optimizer(self.model)
        self._scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.99)
        self._step: everygpu.TrainStep | None = None
        if setup.loop == "ShardedOptimizer":
            self.optimizer = everygpu.ShardedOptimizer(self.optimizer, ["cpu"] * 2)
        if setup.loop == "TrainStep":
            self._step = everygpu.TrainStep(self.model, F.cross_entropy, self.optimizer)
        self._feeder = everygpu.Feeder(make_loader(self.samples), self.model, timeout=DATA_TIMEOUT_S)
        self.checkpoints = everygpu.CheckpointManager(
            root,
            keep=KEEP,
            every=SAVE_EVERY,
            asynchronous=setup.asynchronous,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self._scheduler,
            data=self._feeder,
        )

    def resume(self) -> int:
        return self.checkpoints.resume()

    def batches(self) -> Iterator[Any]:
        return iter(self._feeder)

    def end_pass(self) -> None:
        self._feeder.close()

    def train(self, images: Any, labels: Any, on: Callable[[str], object]) -> Tensor:
        self.model.train()
        on("forward")
        if self._step is not None:
            loss = self._step(images, labels)
            on("backward")
            on("update")
        else:
            loss = F.cross_entropy(self.model(images), labels)
            on("backward")
            self.optimizer.zero_grad()
            loss.backward()
            on("update")
            self.optimizer.step()
        self._scheduler.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, images: Tensor) -> Tensor:
        self.model.eval()
        found: Tensor = self.model(images)
        self.model.train()
        return found

    def save(self, step: int) -> bool:
        return self.checkpoints.save(step) is not None

    def wait(self) -> None:
        self.checkpoints.wait()

    def close(self) -> None:
        self.checkpoints.close()

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.net.state_dict(), self.optimizer.state_dict()
