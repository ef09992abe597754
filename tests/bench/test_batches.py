"""Several batches: all ways to train cycle through the same ones, in the same order."""

import pytest
import torch
from torch import nn

from everygpu.bench import Batches
from everygpu.bench.training import find_training
from everygpu.bench.ways import WAYS, Work
from tests.bench import own
from tests.bench.measuring import OWN, measure


@pytest.mark.parametrize(("way", "num_devices"), [("bare", 1), ("loop", 2), ("step", 2)])
def test_steps_take_them_in_turn(way, num_devices):
    seen = []
    training = find_training(f"{OWN}several")

    def loss(output, target):
        seen.append((len(output), target.flatten().tolist()))
        return output.square().mean()

    work = Work(training=training._replace(loss=loss), devices=[torch.device("cpu")] * num_devices, precision="fp32")
    step = WAYS[way].make(work)
    for _ in range(4):
        step()
    assert seen == [(n * num_devices, [n] * n * num_devices) for n in (6, 4, 2, 6)]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("way", ["bare", "ddp"])  # whose loss is an error when another batch comes
def test_a_round_is_whole_cycles(way):
    row = measure(way, f"{OWN}several")
    assert (row["num_batches"], row["num_steps"], row["rows_per_device"]) == (3, 3, 4)
    assert row["samples_per_s"] == pytest.approx(4 * WAYS[way].num_devices(2) * 1e3 / row["ms"])


def test_each_is_trained_on_before_rounds_begin(monkeypatch):
    seen = []

    class Noting(nn.Linear):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    def many():
        model = Noting(1, 1)
        return model, lambda output: output.mean(), own.sgd(model), Batches([(torch.ones(n, 1),) for n in range(1, 21)])

    monkeypatch.setattr(own, "several", many)
    row = measure("bare", f"{OWN}several")
    assert seen == list(range(1, 21)) * (6 + 3)
    assert row["rows_per_device"] == 10.5


def test_rows_as_asked_for():
    assert measure("bare", f"{OWN}small_bert", rows=2)["rows_per_device"] == 2
    row = measure("bare", f"{OWN}small_bert", rows=9)
    assert row["samples_per_s"] == pytest.approx(9e3 / row["ms"])
