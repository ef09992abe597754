"""Copies are compared between replays of captured steps, which stay valid."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from everygpu.errors import DivergedError
from tests.faults.warned import warnings
from tests.step.scenarios import NUM_BEFORE, Devices, Step, X, Y, make_step
from tests.step.test_capture import Net, num_graphs
from tests.step.test_train_step import assert_replicas_bit_equal


def make(used: list[torch.device], check_every: int) -> Step:
    torch.manual_seed(0)
    step = make_step(used, check_every=check_every)
    for _ in range(NUM_BEFORE):
        step(X, Y)
    assert num_graphs(step) == 1
    return step


def trainable(step: Step, replica: int) -> Tensor:
    """Return a replica's copy of the first layer's weight."""
    flat_params = step._strategy.flat_params
    return flat_params._slots[replica][
        next(i for i, p in enumerate(flat_params.params) if p is step.model.module.first.weight)
    ]


def frozen(step: Step, replica: int) -> Tensor:
    """Return a replica's copy of the frozen weight."""
    weight = step.model.module.frozen
    return step._strategy.copies()[id(weight)][replica].data


@pytest.mark.parametrize(
    ("find", "replica", "check_every"), [(trainable, 0, 2), (trainable, 1, 1), (frozen, 0, 1), (frozen, 1, 2)]
)
def test_a_flip_between_replays(
    capturing: Devices, find: Callable[[Step, int], Tensor], replica: int, check_every: int
) -> None:
    used = capturing(3)
    step = make(used, check_every)
    if check_every == 2:  # the next step compares
        step(X, Y)
    attempts = step._capture._num_attempts
    bits = find(step, replica).view(-1).view(torch.int32)
    bits[2] = int(bits[2]) ^ 1 << 3
    param = "first.weight" if find is trainable else "frozen"
    with pytest.raises(DivergedError, match=f"other bits of {param} in replica"):
        step(X, Y)
    bits[2] = int(bits[2]) ^ 1 << 3
    for _ in range(check_every):
        step(X, Y)
    assert step.stats().engine == "capture"
    assert num_graphs(step) == 1
    assert step._capture._num_attempts == attempts, "nothing was captured again"
    assert_replicas_bit_equal(step)


class Flipping(Net):
    """Flips bits of a weight that backward doesn't read, in the replica whose rows begin with 1."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros((), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        with torch.no_grad():
            self.first.weight.data.view(torch.int32)[0, 0].bitwise_xor_(self.mask * x[0, 0].int())
        return found


def test_with_a_check_before_each_update_flips_within_a_replay_are_found(capturing: Devices) -> None:
    used = capturing(3)
    x = X.clone()
    x[:, 0] = 0
    x[len(x) // len(used) : 2 * len(x) // len(used), 0] = 1
    torch.manual_seed(0)
    step = make_step(used, Flipping, check_every=1)
    net: Any = step.model.module
    with warnings() as lines:
        for _ in range(NUM_BEFORE):
            step(x, Y)
        assert step.stats().engine == "capture"
        assert not lines
        saved = net.first.weight.detach().clone()
        net.mask.fill_(1 << 20)
        with pytest.raises(DivergedError, match="other bits of first.weight in replica 1"):
            step(x, Y)
        net.mask.fill_(0)
        with torch.no_grad():
            net.first.weight.copy_(saved)
        step(x, Y)
    assert not lines
    assert step.stats().engine == "capture"
    assert num_graphs(step) == 1
