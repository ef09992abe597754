"""The model of a random program: a stem, blocks and a head, and the forms of what goes in and comes out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parallel.programs.blocks import BLOCKS, WIDTH

NUM_OUTPUTS, NUM_TOKENS, IGNORED = 4, 11, -100


@dataclass
class Inputs:
    """A batch as a dataclass."""

    x: Tensor
    weight: Tensor
    name: str


@dataclass
class Answer:
    """An output as a dataclass."""

    logits: Tensor
    hidden: Tensor


class Pair(NamedTuple):
    """An output as a named tuple."""

    logits: Tensor
    hidden: Tensor


CALLS: dict[str, Callable[..., Any]] = {
    "positional": lambda model, x, w, **more: model(x, w, **more),
    "keyword": lambda model, x, w, **more: model(x=x, weight=w, **more),
    "mixed": lambda model, x, w, **more: model(x, weight=w, **more),
    "dict": lambda model, x, w, **more: model({"x": x, "weight": w, "name": "batch"}, **more),
    "dataclass": lambda model, x, w, **more: model(Inputs(x, w, "batch"), **more),
    "nested tuple": lambda model, x, w, **more: model((x, [w, None]), **more),
}
"""How a batch is handed to the model."""

ANSWERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda logits, hidden: logits,
    "tuple": lambda logits, hidden: (logits, hidden),
    "dict": lambda logits, hidden: {"logits": logits, "hidden": [hidden]},
    "dataclass": Answer,
    "named tuple": Pair,
}
"""What the model returns."""

IN_MODEL = {"mean in the model": "mean", "sum in the model": "sum"}
"""Losses that the model computes itself, with their reduction."""


def opened(x: Any, weight: Any) -> tuple[Tensor, Tensor]:
    if isinstance(x, dict):
        return x["x"], x["weight"]
    if isinstance(x, Inputs):
        return x.x, x.weight
    if isinstance(x, tuple):
        return x[0], x[1][0]
    return x, weight


def logits_of(answer: Any) -> Tensor:
    if isinstance(answer, Tensor):
        return answer
    if isinstance(answer, dict):
        return answer["logits"]
    return answer[0] if isinstance(answer, tuple) else answer.logits


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.lin = nn.Linear(27, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(F.relu(self.conv(x)).flatten(1))


STEMS: dict[str, Callable[[], nn.Module]] = {
    "features": lambda: nn.Linear(5, WIDTH),
    "sequence": lambda: nn.Linear(5, WIDTH),
    "tokens": lambda: nn.Embedding(NUM_TOKENS, WIDTH),
    "images": Images,
}


class Net(nn.Module):
    """Counts training steps in Python, and takes a block that is added later."""

    def __init__(self, stem: str, blocks: tuple[str, ...], answer: str, loss: str, *, counts: bool) -> None:
        super().__init__()
        self.stem = STEMS[stem]()
        self.blocks = nn.ModuleList(BLOCKS[name]() for name in blocks)
        self.head = nn.Linear(WIDTH, NUM_OUTPUTS)
        self.answer, self.loss = answer, loss
        self.counts, self.step = counts, 0

    def forward(self, x: Any = None, weight: Any = None, *, y: Tensor | None = None) -> Any:
        x, weight = opened(x, weight)
        if self.training and self.counts:
            self.step += 1
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        if hasattr(self, "extra"):
            h = h + self.extra(h)
        h = h * weight.view(-1, *[1] * (h.dim() - 1)).to(h.dtype)
        out = self.head(h) / (1 + 0.1 * self.step)
        if y is not None:
            loss = F.mse_loss(out.to(y.dtype), y, reduction=IN_MODEL[self.loss])
            return loss if self.answer == "tensor" else {"loss": loss, "logits": out}
        return ANSWERS[self.answer](out, h)


class Carrying(nn.Module):
    """Takes its state of the batch before, with rows first, and returns the next."""

    def __init__(self, cell: str, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.rnn = getattr(nn, cell)(5, WIDTH, num_layers=2, batch_first=True)
        self.blocks = nn.Sequential(*(BLOCKS[name]() for name in blocks))
        self.head = nn.Linear(WIDTH, NUM_OUTPUTS)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        before = None if state is None else _turned(state)
        out, after = self.rnn(x, before)
        return self.head(self.blocks(out)), _turned(after)


def _turned(state: Any) -> Any:
    return tuple(map(_turned, state)) if isinstance(state, tuple) else state.transpose(0, 1).contiguous()


class Generator(nn.Module):
    def __init__(self, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, WIDTH), *(BLOCKS[name]() for name in blocks))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(self.head(self.body(z)))


class Critic(nn.Module):
    def __init__(self, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, WIDTH), *(BLOCKS[name]() for name in blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).squeeze(1)
