"""Whatever a step reads, wherever Python keeps it: changed between steps, it counts at the next."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everygpu
from everygpu.parallel.cuda_graphs.recorder import NUM_WARM_UPS
from tests.parallel.cuda_graphs.forwards import Devices
from tests.parallel.cuda_graphs.forwards import num_recordings as num_of_model
from tests.parallel.cuda_graphs.places import PLACES, Place, number_of
from tests.step.test_capture import num_recordings as num_of_step

WAYS = ["auto", "loss", "must", "graphs"]
"""``TrainStep``'s default, where the model or the loss reads; ``capture=True``; ``engine="graphs"``."""


class Model(nn.Module):
    def __init__(self, place: Place | None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if self.place is None else y * number_of(self.place.read())


class Run:
    """Takes steps of one way of training, with captures or without."""

    def __init__(self, place: Place, way: str, used: list[torch.device], *, captures: bool) -> None:
        torch.manual_seed(0)
        net = Model(None if way == "loss" else place).to(used[0])
        self.way, self.net = way, net
        engine = "graphs" if captures and way == "graphs" else "threads"
        self.model = everygpu.DataParallel(net, used, engine=engine)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.step: everygpu.TrainStep | None = None
        if way != "graphs":
            capture: Any = captures and (way == "must" or "auto")
            self.step = everygpu.TrainStep(self.model, self.make_loss(place), self.optimizer, capture=capture)

    def make_loss(self, place: Place) -> Any:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            found = (output - target).square().mean()
            return found * number_of(place.read()) if self_reads else found

        self_reads = self.way == "loss"
        return loss

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if self.step is not None:
            return self.step(x, y)
        loss = (self.model(x) - y).square().mean() + 0
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def num_captured(self) -> int:
        return num_of_model(self.model) if self.step is None else num_of_step(self.step)


def check(kind: type[Place], way: str, used: list[torch.device], seed: int, num_changes: int = 1) -> None:
    """Change a value at random between steps, of which all are to be those of eager ones."""
    chance = random.Random(f"{kind.__name__} {way} {seed}")
    place = kind()
    plain, captured = (Run(place, way, used, captures=c) for c in (False, True))
    generator = torch.Generator().manual_seed(seed)
    try:
        for change in range(num_changes + 1):
            if change:
                place.write(chance.choice(place.values))
            num = NUM_WARM_UPS + 3 if change == 0 else chance.randrange(1, NUM_WARM_UPS + 5)
            for _ in range(num):
                x, y = (torch.randn(4, n, generator=generator).to(used[0]) for n in (3, 2))
                found = captured(x, y)
                if not kind.is_written:
                    torch.testing.assert_close(found, plain(x, y), rtol=1e-5, atol=1e-6)
            if change == 0:
                assert captured.num_captured() == kind.is_seen
    finally:
        place.drop()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", PLACES)
def test_a_changed_value_counts(recording: Devices, kind: type[Place], way: str) -> None:
    if not kind.is_seen and way in ("must", "graphs"):
        pytest.skip("there the user says that it doesn't change")
    check(kind, way, recording(1), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [kind for kind in PLACES if kind.is_seen])
def test_values_that_change_again_and_again_count(recording: Devices, kind: type[Place], way: str) -> None:
    for seed in range(1, 6):
        check(kind, way, recording(1 + seed % 2), seed, num_changes=4)
