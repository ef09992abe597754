"""Random states: after a restore every generator goes on as it would have."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from everygpu.checkpoint.rng import plan_rng_restore, take_rng_states
from everygpu.checkpoint.values import decode, encode
from everygpu.errors import CheckpointDamagedError


def saved_states() -> Any:
    """The states as they come back from disk."""
    return decode(json.loads(json.dumps(encode(take_rng_states(), "rng", {}))), {})


def draw() -> tuple[Any, ...]:
    numbers = (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.randn(3).tolist())
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    return (*numbers, *(torch.randn(3, device=f"cuda:{i}").tolist() for i in devices))


def test_every_generator_goes_on_where_it_was() -> None:
    draw()  # leaves a second gaussian waiting in Python's and NumPy's generators
    states = saved_states()
    expected = draw()
    assert draw() != expected
    plan_rng_restore(states)()
    assert draw() == expected


def test_a_replaced_numpy_generator_survives() -> None:
    old = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        states = saved_states()
        expected = np.random.rand()
        plan_rng_restore(states)()
        assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(old)


def test_states_of_absent_devices_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    set_on: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: set_on.append(index))
    plan_rng_restore(take_rng_states() | {"cuda": [b"x" * 16] * 4})()
    assert set_on == [0, 1]


def test_cuda_is_not_touched_where_it_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: pytest.fail("CUDA was initialised"))
    assert "cuda" not in take_rng_states()


@pytest.mark.gpu
def test_cuda_generators_go_on_where_they_were() -> None:
    draws = [torch.randn(3, device=f"cuda:{i}") for i in range(torch.cuda.device_count())]
    assert draws
    states = saved_states()
    expected = draw()
    plan_rng_restore(states)()
    assert draw() == expected


@pytest.mark.parametrize(
    "change",
    [*({"python": bad} for bad in (None, (3, (1, 2), None))), {"torch": b"short"}, {"cuda": [3]}, {"numpy": None}],
    ids=str,
)
def test_broken_states_are_damage(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointDamagedError, match="random states"):
        plan_rng_restore(take_rng_states() | change)
