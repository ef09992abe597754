"""What a user might name after ``everygpu bench --model tests.bench.own:``."""

import torch
from torch import nn

from everygpu.bench import Batches
from everygpu.bench.workloads import bert

NUMBER = 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def classifier():
    model = net()
    return model, nn.CrossEntropyLoss(), sgd(model), [torch.randn(6, 3), torch.randint(0, 2, (6,))]


class Pair(nn.Module):
    """Takes two inputs and returns its loss alone."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x, y):
        return nn.functional.mse_loss(self.inner(x), y)


class Summed(Pair):
    """Takes keywords and returns its loss beside other things."""

    def forward(self, *, x, y):
        return {"loss": super().forward(x, y), "scale": 2.0}


def positional():
    model = Pair()
    return model, None, sgd(model), (torch.randn(4, 3), torch.randn(4, 2))


def keywords():
    model = Summed()
    return model, None, sgd(model), {"x": torch.randn(4, 3), "y": torch.randn(4, 2)}


NUM_ROWS = (6, 4, 2)


class InOrder(nn.Module):
    """A loss that is an error unless the batches come in their order, again and again."""

    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def forward(self, output, target):
        rows = NUM_ROWS[self.num_calls % len(NUM_ROWS)]
        assert len(target) % rows == 0
        assert target[0].item() == rows
        self.num_calls += 1
        return nn.functional.mse_loss(output, target.expand_as(output))


def several():
    model = net()
    batches = [(torch.randn(n, 3), torch.full((n, 1), float(n))) for n in NUM_ROWS]
    return model, InOrder(), sgd(model), Batches(batches)


def small_bert():
    torch.manual_seed(0)
    sizes = {"vocabulary": 50, "width": 16, "num_layers": 2, "num_heads": 2, "dropout": 0.0}
    return bert.bert(rows=4, lengths=(4, 12), num_batches=3, **sizes)


def failing():
    raise KeyError("mine")


def too_large():
    raise torch.OutOfMemoryError("tried to allocate 1 TiB")


def three():
    return classifier()[:3]
