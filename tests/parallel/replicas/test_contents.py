"""What values hold is compared at every depth."""

import types

import numpy
import pytest
import torch
from torch import nn

from everygpu.parallel.replicas.contents import DeepContents, is_open


def make_value():
    inner = types.SimpleNamespace(gain=1.0, names=["a"], tensor=torch.ones(2))
    layer = nn.Sequential(nn.Linear(1, 1))
    return types.SimpleNamespace(inner=inner, table={"x": [inner]}, function=lambda x, d=[1]: x, layer=layer)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: setattr(v.inner, "gain", 2.0),
        lambda v: setattr(v.inner, "new", 2.0),
        lambda v: delattr(v.inner, "gain"),
        lambda v: v.inner.names.append("b"),
        lambda v: v.table["x"].append(3),
        lambda v: v.inner.tensor.add_(1),
        lambda v: v.inner.tensor.requires_grad_(),
        lambda v: v.layer[0].requires_grad_(False),
        lambda v: v.layer.eval(),
        lambda v: v.function.__defaults__[0].append(1),
    ],
)
def test_a_change_at_any_depth_is_seen(change):
    value = make_value()
    contents = DeepContents([value], {})
    assert contents.is_same()
    assert not contents.is_opaque
    change(value)
    assert not contents.is_same()


def test_what_is_known_is_not_looked_into():
    value = make_value()
    contents = DeepContents([value], {id(value.inner): value.inner})
    value.inner.gain = 2.0
    assert contents.is_same()


def test_an_array_may_change_unseen():
    assert DeepContents([types.SimpleNamespace(table=numpy.ones(2))], {}).is_opaque


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (types.SimpleNamespace(), True),
        (nn.Linear(1, 1), False),
        (torch.ones(1), False),
        (torch.Generator(), False),
        (types, False),
        (int, False),
        ({}, False),
        (3, False),
    ],
)
def test_objects_such_as_a_configuration_are_open(value, expected):
    assert is_open(value) is expected
