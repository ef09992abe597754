"""``num_replicas`` in captures: the same bits as without them, on any number of devices."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import everygpu
from everygpu.step.options import can_capture
from tests import tape
from tests.parallel import test_same_bits as same


@pytest.fixture(autouse=True)
def acted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tape.install(monkeypatch, fused=True)


class Block(nn.Module):
    """A transformer with tied weights, without checkpoints: what these set, a capture can't."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.block(self.embed(tokens)), self.embed.weight).transpose(1, 2)


def transformer() -> Any:
    return Block(), same.transformer()[1], nn.CrossEntropyLoss()


MODELS = {"mlp": same.mlp, "cnn": same.cnn, "synced": same.MODELS["synced"], "transformer": transformer}
WAYS: dict[str, dict[str, Any]] = {
    "loop": {"engine": "capture"},
    "mean": {"engine": "capture", "buffers": "mean", "optimizer": same.sgd},
    "adamw": {"step": True},
    "clipped": {"step": True, "clip_norm": 0.1, "optimizer": same.sgd},
    "ignored": {"step": True, "on_nonfinite": "ignore"},
    "accumulated": {"step": True, "accumulate": 2, "clip_norm": 0.1},
    "fp16": {"step": True, "precision": "fp16"},
    "bf16": {"step": True, "precision": "bf16"},
}


def eagerly(way: dict[str, Any]) -> dict[str, Any]:
    return {**way, "capture": False} if "step" in way else {**way, "engine": "threads"}


def check(name: str, way: dict[str, Any], num_devices: tuple[int, ...], num_steps: int) -> None:
    make = MODELS[name]
    expected = same.train(make, 1, num_replicas=4, num_steps=num_steps, **eagerly(way))
    assert expected.engines == {"threads"}
    for n in num_devices:
        found = same.train(make, n, num_replicas=4, num_steps=num_steps, **way)
        assert "capture" in found.engines
        same.assert_same(expected, found)


@pytest.mark.parametrize("way", WAYS)
def test_captured_as_eagerly(way: str) -> None:
    check("mlp", WAYS[way], (1, 2, 4), 10)


@pytest.mark.parametrize(("name", "way"), [("synced", "loop"), ("cnn", "clipped"), ("transformer", "adamw")])
def test_models_are_captured(name: str, way: str) -> None:
    check(name, WAYS[way], (1, 2), 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_all_after_60_steps(name: str, way: str) -> None:
    check(name, WAYS[way], (1, 2, 4), 60)


def test_a_loss_with_weights_of_its_own() -> None:
    class Head(nn.Linear):
        def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return F.cross_entropy(super().forward(input), target)

    def make() -> Any:
        module, batch, _ = same.mlp()
        return module, batch, Head(3, 3)

    MODELS["head"] = make
    try:
        check("head", WAYS["clipped"], (1, 2), 8)
    finally:
        del MODELS["head"]


def test_a_loss_of_the_models_own_weights_is_left_out_of_captures() -> None:
    MODELS["penalised"] = same.penalised
    try:
        check("penalised", WAYS["clipped"], (1, 2), 13)
    finally:
        del MODELS["penalised"]


def test_what_replicas_draw_on_the_host_is_not_captured() -> None:
    results = [same.train(same.noisy, n, num_replicas=4, num_steps=8, engine="capture") for n in (1, 4)]
    assert results[0].engines == {"threads"}
    same.assert_same(*results)


def test_an_update_that_is_not_finite_is_left_out_as_eagerly() -> None:
    def train(num_devices: int, *, capture: bool | str) -> list[torch.Tensor]:
        everygpu.seed_all(1)
        module, batch, loss = same.mlp()
        model = everygpu.DataParallel(module, ["cpu"] * num_devices, num_replicas=4)
        step = everygpu.TrainStep(model, loss, torch.optim.AdamW(module.parameters(), 1e-2), capture=capture)
        for index in range(10):
            x, y = batch(1)
            x[-1, 0] = float("inf") if index in (6, 8) else 0.0
            step(x, y)
        assert step.stats().num_skipped == 2
        model.release()
        return [p.detach() for p in module.parameters()]

    expected = train(1, capture=False)
    for found in (train(1, capture="auto"), train(4, capture="auto")):
        assert all(map(torch.equal, expected, found))


def test_steps_on_gpus_may_be_captured(monkeypatch):
    model = everygpu.DataParallel(nn.Linear(2, 2), ["cpu"] * 2, num_replicas=4)
    assert not can_capture(model, "auto")
    monkeypatch.setattr(model, "replica_devices", tuple(torch.device("cuda", i // 2) for i in range(4)))
    assert can_capture(model, "auto")
    assert not can_capture(model, False)
