"""Models and batches that the equality tests run: each says how to make itself and what to call it with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import everygpu


class Returning(nn.Module):
    """Returns what a function makes of a replica's rows."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Tied(nn.Module):
    """One weight used twice, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6, bias=False)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, (h, _) = self.lstm(x)
        return self.head(out), h.transpose(0, 1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(x, mask=mask)


class SparseLookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.table(index))


class ComplexMap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real((x.to(self.weight.dtype) @ self.weight) * self.scale).flatten(1)


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3))


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, ...]]

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        module = self.build().double()
        for child in module.modules():
            if isinstance(child, nn.BatchNorm2d):
                nn.init.normal_(child.running_mean)
        return module


def additive_mask() -> Tensor:
    """Not a causal one: the encoder would notice, and leave the tensor itself out of the graph."""
    return torch.randn(4, 4)


CASES = [
    Case(
        name="mlp",
        build=lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)),
        batch=lambda n: (torch.randn(n, 5),),
    ),
    Case(name="cnn", build=lambda: convolutional().eval(), batch=lambda n: (torch.randn(n, 2, 5, 5),)),
    Case(name="lstm", build=Recurrent, batch=lambda n: (torch.randn(n, 3, 5),)),
    Case(
        name="transformer",
        build=Masked,
        batch=lambda n: (torch.randn(n, 4, 8), everygpu.Replicated(additive_mask())),
    ),
    Case(name="tied", build=Tied, batch=lambda n: (torch.randn(n, 6),)),
    Case(
        name="sparse",
        build=SparseLookup,
        batch=lambda n: (torch.randint(0, 11, (n, 3)),),
    ),
    Case(name="complex", build=ComplexMap, batch=lambda n: (torch.randn(n, 4),)),
]
