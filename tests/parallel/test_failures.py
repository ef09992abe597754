"""What a failed call has allocated is free as soon as its exception is: no reference cycle waits for the collector."""

import gc
import logging
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo import lookup_backend

import everygpu
from everygpu.checkpoint.background import Background
from everygpu.parallel.engines import compiled

HELD = []
"""The tensors that were made."""


@pytest.fixture(autouse=True)
def without_collector():
    gc.collect()
    gc.disable()
    HELD.clear()
    yield
    gc.enable()


def hold(x):
    HELD.append(weakref.ref(x))
    return x


def fail(x):
    temporary = hold(x.clone())
    raise ValueError(f"no use for {temporary.shape}")


class Failing(nn.Module):
    """Fails on rows that it is told."""

    def __init__(self, rows):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.rows = rows

    def forward(self, x):
        temporary = hold(x.clone())
        if int(x[0, 0]) in self.rows:
            raise ValueError("no use")
        return self.linear(temporary)


def numbered():
    return torch.arange(7.0)[:, None].repeat(1, 4)


def check(call):
    with pytest.raises(ValueError, match="no use"):
        call()
    assert HELD
    assert [ref() for ref in HELD] == [None] * len(HELD)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("rows", [[0], [6], [0, 3, 6]])
def test_forward(rows):
    model = everygpu.DataParallel(Failing(rows), ["cpu"] * 3)
    step = everygpu.TrainStep(model, torch.mean, sgd(model))
    check(lambda: model(numbered()))
    check(lambda: everygpu.data_parallel(Failing(rows), numbered(), ["cpu"] * 3))
    check(lambda: step(numbered()))


def test_compiled(monkeypatch):
    monkeypatch.setattr(compiled, "InductorBackend", lambda _: lookup_backend("eager"))
    monkeypatch.setattr(compiled, "_as_function", lambda module: torch.compiler.disable(module.forward))
    model = everygpu.DataParallel(Failing([3]), ["cpu"] * 3, engine="compile")
    check(lambda: model(numbered()))


def test_loss():
    model = everygpu.DataParallel(Failing([]), ["cpu"] * 3)
    step = everygpu.TrainStep(model, fail, sgd(model))
    check(lambda: step(numbered()))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_loader(prefetch):
    def batches():
        yield torch.ones(4)
        fail(torch.ones(4))

    feeder = everygpu.Feeder(batches(), ["cpu"] * 3, prefetch=prefetch)
    check(lambda: list(feeder))


def test_background_save(caplog):
    caplog.set_level(logging.CRITICAL)  # pytest keeps the record, and that the exception
    background = Background()
    background.start(lambda: fail(torch.ones(4)))
    check(background.wait)
