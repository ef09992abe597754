"""A model that reads variables outside itself in many ways."""

import functools
import types

import numpy
import torch
from torch import nn

from tests.parallel.engines.processes import config_module
from tests.parallel.engines.processes.config_module import shift

FACTOR = 1.0
ITEMS = [1.0]
WEIGHTS = {"w": 1.0}
OPTIONS = types.SimpleNamespace(gain=1.0, inner=types.SimpleNamespace(gain=1.0))
MASK = torch.ones(3).share_memory_()


def count_calls(function):
    calls = []

    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) * (1 + len(calls))

    wrapper.calls = calls
    return wrapper


@count_calls
def activate(x):
    return x


def choose(x, gains=[1.0]):  # noqa: B006 - a default that changes
    return x * gains[0]


class Base(nn.Module):
    gain = 1.0
    table = [1.0]


class Outside(Base):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(3))
        self.options = types.SimpleNamespace(inner=types.SimpleNamespace(gain=1.0), gains=[[1.0]])
        self.array = numpy.ones(1)

    @property
    def depth(self):
        return ITEMS[-1]

    def scale(self, x):
        return x * FACTOR * self.gain * self.table[0]

    def forward(self, x):
        x = self.scale(self.linear(x)) * self.depth * WEIGHTS["w"]
        x = x * config_module.SCALE * config_module.TABLE["nested"][0] * OPTIONS.gain * OPTIONS.inner.gain
        x = choose(activate(shift(x))) * MASK
        x = x * self.options.inner.gain * self.options.gains[0][-1] * self.array[0].item()
        if "LATER" in globals():
            x = x * LATER  # noqa: F821 - defined by a test
        return x * getattr(config_module, "ABSENT", 1.0)

    def unused(self):
        return UNSENT


UNSENT = open(__file__)  # noqa: SIM115 - what can't be sent, in a method that isn't called
UNSENT.close()
