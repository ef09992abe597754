"""Objects made, used and dropped leave no thread, descriptor or memory, while another model trains.

100 wrappers alone: tests/parallel/test_wrapper_life.py. Descriptors, and threads: the fixture of all tests.
"""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import everygpu

X = torch.ones(4, 3)
NUM = 34
"""Of each kind: about 100 together."""


def wrapped() -> everygpu.DataParallel:
    return everygpu.DataParallel(nn.Linear(3, 3), ["cpu"] * 2)


def train_step() -> list[Any]:
    model = wrapped()
    step = everygpu.TrainStep(model, F.mse_loss, torch.optim.AdamW(model.parameters()))
    step(X, X)
    return [step, model, model.module, model.module.weight]


def sharded_optimizer() -> list[Any]:
    model = wrapped()
    optimizer = everygpu.ShardedOptimizer(torch.optim.AdamW(model.parameters()), ["cpu"] * 2)
    model(X).sum().backward()
    optimizer.step()
    with model.frozen():
        model(X)
    return [optimizer, model, model.module, model.module.weight]


def feeder() -> list[Any]:
    """Leave the loop midway."""
    model = wrapped()
    made = everygpu.Feeder([X] * 4, model)
    batches = iter(made)
    model(next(batches))
    return [made, model, model.module]


@pytest.mark.parametrize("make", [train_step, sharded_optimizer, feeder])
def test_objects_leave_nothing(make: Callable[[], list[Any]]) -> None:
    other, is_over, outputs = wrapped(), threading.Event(), []

    def use() -> None:
        while not is_over.wait(0.005):
            outputs.append(other(X).sum().backward())

    thread = threading.Thread(target=use)
    thread.start()
    left = [weakref.ref(made) for _ in range(NUM) for made in make()]
    while thread.is_alive() and not outputs:
        time.sleep(0.001)
    is_over.set()
    thread.join()
    gc.collect()
    assert [ref for ref in left if ref() is not None] == []
    assert outputs
