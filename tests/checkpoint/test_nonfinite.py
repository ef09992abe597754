"""Checkpoints of models with values that are not finite push out none that is better."""

import math
import os

import pytest
import torch
from torch import nn

import everygpu
from everygpu.checkpoint.manager import find_nonfinite


def make(value=0.0):
    model = nn.Linear(2, 1)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    model.register_buffer("center", torch.tensor(value))
    return model


def steps_in(directory):
    return [int(name.removeprefix("step-")) for name in sorted(os.listdir(directory)) if name.startswith("step-")]


def save_all(directory, values, first=1, **options):
    model = make()
    with everygpu.CheckpointManager(directory, model=model, **options) as checkpoints:
        for step, value in enumerate(values, first):
            checkpoints.wait()
            model.center.fill_(value)
            checkpoints.save(step)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_finite_one_stays(tmp_path, caplog, asynchronous):
    save_all(tmp_path, [1, 2, math.nan, math.nan, math.inf], keep=2, asynchronous=asynchronous)
    assert steps_in(tmp_path) == [2, 4, 5]
    (message,) = [r.getMessage() for r in caplog.records if "nan or infinite" in r.getMessage()]
    assert "at step-00000003 has nan or infinite values in center and 1 more of its tensors" in message
    assert "resume(2) goes back to it" in message
    model = make()
    everygpu.CheckpointManager(tmp_path, model=model).resume(2)
    assert model.center == 2


def test_the_next_run_keeps_it_too_until_one_is_finite_again(tmp_path):
    save_all(tmp_path, [1, math.nan, math.nan], keep=1)
    assert steps_in(tmp_path) == [1, 3]
    model = make()
    checkpoints = everygpu.CheckpointManager(tmp_path, keep=1, model=model)
    assert checkpoints.resume() == 3
    checkpoints.save(4)
    assert steps_in(tmp_path) == [1, 4]
    model.center.fill_(5)
    checkpoints.save(5)
    assert steps_in(tmp_path) == [5]


def test_infinities_of_a_mask_keep_nothing(tmp_path, caplog):
    save_all(tmp_path, [1, 2, 3], keep=1)
    assert steps_in(tmp_path) == [3]
    assert not caplog.records


def test_a_run_of_not_finite_ones_alone_is_rotated(tmp_path):
    save_all(tmp_path, [math.nan] * 4, keep=2)
    assert steps_in(tmp_path) == [3, 4]


BAD = [math.nan, math.inf, -math.inf]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_found(devices, dtype):
    (device,) = devices(1)
    good = torch.full((3, 4), 60000.0, device=device).to(dtype)  # their sum is none in float16
    tensors = {"good": good, "empty": good[:0], "ints": torch.tensor([1]), "bool": torch.tensor([True])}
    for i, bad in enumerate(BAD):
        tensors[f"bad {i}"] = good.clone()
        tensors[f"bad {i}"][1, 2] = bad
    tensors["transposed"] = tensors["bad 0"].T
    tensors["masked"] = torch.tensor([-math.inf, 0], device=device)
    tensors["float8"] = torch.ones(2).to(torch.float8_e5m2)
    calls = []
    assert find_nonfinite(tensors, lambda: calls.append(1)) == ["bad 0", "transposed", "bad 1", "bad 2", "masked"]
    assert len(calls) == len(tensors)
