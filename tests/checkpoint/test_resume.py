"""A run that is stopped and resumed is the run that was not: bit for bit on the CPU."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import everygpu
from tests.checkpoint.models import WRAPPERS, Net, Wrap, same_state


class Training:
    """AdamW, a scheduler, a scaler, dropout, BatchNorm, and data shuffled by a generator of its own."""

    def __init__(self, wrap: Wrap, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = wrap(Net(seed))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = lr_scheduler.SequentialLR(
            self.optimizer,
            [lr_scheduler.LinearLR(self.optimizer, total_iters=3), lr_scheduler.CosineAnnealingLR(self.optimizer, 8)],
            [3],
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.shuffle = torch.Generator().manual_seed(seed)

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "shuffle": self.shuffle,
        }

    def run(self, steps: int) -> list[float]:
        data = torch.linspace(-1, 1, 64).reshape(16, 4)
        losses = []
        for _ in range(steps):
            rows = data[torch.randperm(16, generator=self.shuffle)[:8]] * random.random()
            self.optimizer.zero_grad()
            loss = (self.model(rows) - 1).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("name", ["bare", "dp", "compiled", "everygpu"])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path, name: str) -> None:
    # One replica: with several, dropout draws in the order in which the threads come by.
    wrap = WRAPPERS[name] if name != "everygpu" else lambda model: everygpu.DataParallel(model, ["cpu"])
    uninterrupted = Training(wrap, seed=1)
    expected = uninterrupted.run(12)

    stopped = Training(wrap, seed=1)
    losses = stopped.run(5)
    everygpu.save(tmp_path / "ckpt", **stopped.parts(), step=5)

    resumed = Training(wrap, seed=99)
    random.seed(99)
    rest = everygpu.load(tmp_path / "ckpt", rng=True, **resumed.parts())
    losses += resumed.run(12 - rest["step"])

    assert losses == expected
    assert len(set(losses)) == 12
    assert same_state(dict(resumed.model.state_dict()), dict(uninterrupted.model.state_dict()))
    assert same_state(resumed.optimizer.state_dict(), uninterrupted.optimizer.state_dict())


@pytest.mark.parametrize("forgotten", ["optimizer", "scheduler", "shuffle", "rng"])
def test_every_part_matters(tmp_path: Path, forgotten: str) -> None:
    """The test above would notice a part that is not restored."""
    source = Training(WRAPPERS["bare"], seed=1)
    source.run(5)
    everygpu.save(tmp_path / "ckpt", **source.parts())
    expected = source.run(5)

    resumed = Training(WRAPPERS["bare"], seed=99)
    parts = {name: part for name, part in resumed.parts().items() if name != forgotten}
    everygpu.load(tmp_path / "ckpt", rng=forgotten != "rng", **parts)
    assert resumed.run(5) != expected


def test_saving_in_the_middle_changes_nothing(tmp_path: Path) -> None:
    expected = Training(WRAPPERS["bare"], seed=1).run(6)
    training = Training(WRAPPERS["bare"], seed=1)
    losses = []
    for step in range(6):
        everygpu.save(tmp_path / "ckpt", **training.parts(), step=step)
        losses += training.run(1)
    assert losses == expected
