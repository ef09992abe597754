"""Run by test_globals_follow.py: everything that forward reads is defined in ``__main__``."""

import torch
from torch import nn

import everygpu

X = torch.tensor([[1.0], [1.0], [2.0], [2.0]]).expand(4, 3)
FACTOR = 1.0
ITEMS = [1.0]
OPTIONS = {"gain": 1.0}


def shift(x):
    return x * OPTIONS["gain"]


class Net(nn.Module):
    gain = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.mark = None
        self.activate = lambda x: x * FACTOR  # with a namespace of its own whenever attributes are unpickled

    def forward(self, x):
        if x[0, 0] == 2:
            self.mark = object()  # in the helper alone, which then unpickles what it was sent at first
        x = self.linear(self.activate(shift(x))) * self.gain * ITEMS[-1]
        return x + LATER if "LATER" in globals() else x


def check(what, differs=True):
    with torch.no_grad():
        out, expected = model(X), model.module(X)
    assert torch.equal(out, expected), what
    assert model._engine.reason is None, model._engine.reason
    assert differs != torch.equal(out, outs[-1]), what
    outs.append(out)


if __name__ == "__main__":
    outs = [torch.zeros(4, 3)]
    model = everygpu.DataParallel(Net(), device_ids=["cpu"] * 2, engine="processes")
    check("first")
    FACTOR = 2.0
    check("float")
    check("nothing", differs=False)
    ITEMS.append(5.0)
    check("list")
    OPTIONS["gain"] = 3.0
    check("dict")
    Net.gain = 7.0
    check("class attribute")
    LATER = 3.0
    check("defined later")
    del LATER
    check("deleted")

    def shift(x):
        return x * 11

    check("function")
    Net.forward = lambda self, x: self.linear(x) * FACTOR
    check("method")
    FACTOR = 3.0
    check("float in a method that was set later")
    print("all follow")
