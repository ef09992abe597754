"""Which values are looked into."""

import types

import pytest
import torch
from torch import nn

from everygpu.parallel.replicas.contents import is_open


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
