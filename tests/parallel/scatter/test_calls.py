"""Random calls: arguments of any kind, into which forward may write, give outputs, gradients and arguments as on one
device.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from everygpu import DataParallel, Replicated
from everygpu.parallel import gather
from tests.parallel.oracle import TOLERANCE, score

NUM_SEEDS, NUM_SLOW = 40, 1040


class Own(Tensor):
    """Its methods need what torch's operations leave behind."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return Tensor.to(self, self.kind)

    detach = clone = to


class Pair(NamedTuple):
    left: Any
    right: Any


class Draw:
    """A random call, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.dim, self.num_rows = self.random.choice([0, 0, 1]), self.random.randint(1, 7)
        self.num_devices = self.random.randint(1, 3)
        self.kinds = self.random.choices(sorted(LEAVES), k=self.random.randint(1, 4))
        self.steps = self.random.choices(range(len(STEPS)), k=self.random.randint(1, 5))
        self.records = self.random.random() < 0.8
        self.options = {
            "dim": self.dim,
            "split": self.random.choice(["chunk", "even"]),
            "gather": self.random.choice(["sharded", "joined"]),
        }

    def shape(self) -> list[int]:
        shape = self.random.choices(range(1, 4), k=self.random.choice([1, 2, 3]) + self.dim)
        shape.insert(self.dim, self.num_rows)
        return shape

    def describe(self) -> str:
        steps = [STEPS[i].__code__.co_firstlineno for i in self.steps]
        return (
            f"seed {self.seed}: {self.options}, {self.num_rows} rows on {self.num_devices}, {self.kinds}, lines {steps}"
        )


def made(draw: Draw, generator: torch.Generator, *, takes_gradient: bool = False) -> Tensor:
    x = torch.rand(draw.shape(), dtype=torch.float64, generator=generator)
    return x.requires_grad_() * 1 if takes_gradient else x


def own(x: Tensor) -> Tensor:
    x = x.as_subclass(Own)
    x.kind = x.dtype
    return x


LEAVES: dict[str, Callable[[Draw, torch.Generator], Any]] = {
    "plain": made,
    "with a graph": lambda d, g: made(d, g, takes_gradient=True),
    "leaf": lambda d, g: made(d, g).requires_grad_(),
    "permuted": lambda d, g: made(d, g).clone(memory_format=torch.contiguous_format).transpose(-1, -2).contiguous().mT,
    "strided": lambda d, g: made(d, g).repeat_interleave(2, -1)[..., ::2],
    "flipped memory": lambda d, g: made(d, g).movedim(0, -1).contiguous().movedim(-1, 0),
    "of a class": lambda d, g: own(made(d, g)),
    "of a class, with a graph": lambda d, g: own(made(d, g, takes_gradient=True)),
    "integers": lambda d, g: (made(d, g) * 9).long(),
    "array": lambda d, g: made(d, g).numpy().copy(),
    "whole": lambda d, g: Replicated(torch.rand(3, dtype=torch.float64, generator=g)),
    "number": lambda d, g: 0.5,
    "0-dim": lambda d, g: torch.rand((), dtype=torch.float64, generator=g),
    "none": lambda d, g: None,
}
CONTAINERS: list[Callable[[list[Any]], Any]] = [
    list, tuple, lambda xs: {"a": xs}, lambda xs: Pair(xs[0], xs[1:]), lambda xs: [xs[0], *xs],
    lambda xs: [xs, {"again": xs[:1]}],
]  # fmt: skip


def flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in flat(item)]
    return [x for item in value.values() for x in flat(item)] if isinstance(value, dict) else [value]


def plain(x: Any) -> Any:
    return x.as_subclass(Tensor) if isinstance(x, Own) else x


def write_flat(x: Tensor) -> None:
    """Write to the memory as a whole, as code does that counts on a contiguous tensor."""
    (x.view(-1) if x.is_contiguous() else x).mul_(1.5)


# Each of a tensor, the module's parameter, and another tensor of the call. None mixes rows.
STEPS: list[Callable[[Tensor, Tensor, Tensor], Any]] = [
    lambda x, w, y: x.mul_(2),
    lambda x, w, y: x.add_(w),
    lambda x, w, y: x.masked_fill_(x > 0.5, 0.25),
    lambda x, w, y: x.copy_(x.flip(-1)),
    lambda x, w, y: x[..., :1].mul_(2),
    lambda x, w, y: x.clamp_(0.1, 0.6) if y.ndim > 1 else None,
    lambda x, w, y: write_flat(x),
    lambda x, w, y: x * w,
    lambda x, w, y: x.tanh() + y.sum() * 0,
    lambda x, w, y: x.mul_(y) if x.shape == y.shape else None,
]


class Module(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.draw = draw

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = [plain(x) for x in flat([args, kwargs])]
        tensors = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1]
        for x in leaves:
            if isinstance(x, np.ndarray):
                x *= 2
            elif isinstance(x, Tensor) and not x.is_floating_point():
                x.add_(1)
        made: list[Tensor] = []
        for number, step in enumerate(self.draw.steps):
            if tensors:
                x, y = tensors[number % len(tensors)], tensors[(number + 1) % len(tensors)]
                found = STEPS[step](x, self.w, y)
                if isinstance(found, Tensor) and found.shape == x.shape:
                    made.append(found * self.w)
        kept = [(x * self.w).square() for x in tensors]
        return {"made": made, "kept": tuple(kept), "arrays": [x + 1 for x in leaves if isinstance(x, np.ndarray)]}


def run(draw: Draw, num_devices: int) -> Any:
    """Return all that can be seen of a call, or the class of what it raises."""
    draw = Draw(draw.seed)
    generator = torch.Generator().manual_seed(draw.seed)
    leaves = [LEAVES[kind](draw, generator) for kind in draw.kinds]
    roots = [x for x in leaves if isinstance(x, Tensor)]
    for x in roots:
        if x.requires_grad:
            x.retain_grad()
    batch = draw.random.choice(CONTAINERS)(leaves)
    bare = Module(draw)
    model = DataParallel(bare, ["cpu"] * num_devices, **draw.options)
    with torch.set_grad_enabled(draw.records):
        try:
            out = gather(model(batch, again=leaves[0]))
            if draw.records:
                loss = score([out, [plain(x) for x in roots if x.is_floating_point()]])
                if loss.requires_grad:
                    loss.backward()
        except RuntimeError as error:
            return type(error)
    arrays = [x for x in leaves if isinstance(x, np.ndarray)]
    return out, [plain(x).detach() for x in roots], arrays, bare.w.grad


def check(seeds: range) -> None:
    wrong = []
    for draw in map(Draw, seeds):
        expected, found = run(draw, 1), run(draw, draw.num_devices)
        try:
            if isinstance(expected, type) or isinstance(found, type):
                assert found is expected
            else:
                torch.testing.assert_close(found, expected, **TOLERANCE)
        except AssertionError as error:
            wrong.append(f"{draw.describe()}: {str(error)[:200]}")
    assert not wrong, "\n".join(wrong)


def test_calls_are_as_on_one_device() -> None:
    check(range(NUM_SEEDS))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(NUM_SEEDS, NUM_SLOW, 100))
def test_more_calls(first: int) -> None:
    check(range(first, first + 100))
