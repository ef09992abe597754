"""Copies are compared between launches of recorded steps, which stay valid."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import everygpu
from everygpu.errors import ReplicaError
from tests.faults.warned import warnings
from tests.step.scenarios import NUM_BEFORE, Devices, Step, X, Y, adamw
from tests.step.test_capture import Net, num_recordings
from tests.step.test_train_step import assert_replicas_bit_equal


def make(used: list[torch.device], check_every: int | None) -> Step:
    torch.manual_seed(0)
    net = Net().to(used[0])
    step = Step(everygpu.DataParallel(net, used), F.cross_entropy, adamw(net), check_every=check_every)
    for _ in range(NUM_BEFORE):
        step(X, Y)
    assert num_recordings(step) == 1
    return step


def trainable(step: Step, replica: int) -> Tensor:
    """Return a replica's copy of the first layer's weight."""
    flat_params = step._strategy._flat_params
    return flat_params._slots[replica][
        next(i for i, p in enumerate(flat_params.params) if p is step.model.module.first.weight)
    ]


def frozen(step: Step, replica: int) -> Tensor:
    """Return a replica's copy of the frozen weight."""
    if replica == 0:
        return step.model.module.frozen.data
    (bucket,) = step._strategy.kept()[-1:]
    return bucket.flats[replica - 1]


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("find", [trainable, frozen])
def test_a_flip_between_launches(recording: Devices, find: Callable[[Step, int], Tensor], replica: int) -> None:
    used = recording(3)
    step, plain = make(used, 1), make(used, None)
    attempts = step._capture._num_attempts
    bits = find(step, replica).view(-1).view(torch.int32)
    bits[2] = int(bits[2]) ^ 1 << 3
    with warnings() as lines:
        if len(used) == 2:
            with pytest.raises(ReplicaError, match=f"1 element of {'first.weight' if find is trainable else 'frozen'}"):
                step(X, Y)
            return
        step(X, Y)
        assert f"replica {replica} ({used[replica]}) had other bits than most of 3 copies" in lines.pop()
        step(X, Y)
    assert not lines
    assert step.stats().engine == "graphs"
    assert num_recordings(step) == 1
    assert step._capture._num_attempts == attempts, "nothing was recorded again"
    assert_replicas_bit_equal(step)
    for _ in range(2):
        plain(X, Y)
    for ours, expected in zip(step.model.module.parameters(), plain.model.module.parameters()):
        torch.testing.assert_close(ours, expected)


def test_steps_are_recorded_and_compute_the_same(recording: Devices) -> None:
    used = recording(2)
    steps = [make(used, 1), make(used, None)]
    with warnings() as lines:
        for step in steps:
            for _ in range(3):
                step(X, Y)
            assert step.stats().engine == "graphs"
    assert not lines
    for ours, expected in zip(*(step.model.module.parameters() for step in steps)):
        assert ours.equal(expected)
