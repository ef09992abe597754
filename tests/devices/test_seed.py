"""Seeds: the whole run repeats, and replicas draw different numbers."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from everygpu.checkpoint.values import decode, encode
from everygpu.devices.seed import (
    derive_seed,
    plan_rng_restore,
    seed_all,
    spread_generators,
    spread_seeds,
    take_rng_states,
)
from everygpu.errors import OptionError


@pytest.fixture(autouse=True)
def keep_random_state():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_same_seed_same_numbers_everywhere():
    seed_all(5)
    first = draw()
    seed_all(5)
    assert draw() == first
    seed_all(6)
    assert not set(first) & set(draw())


@pytest.mark.parametrize("number", [0, 2**32, 2**63, 2**64 - 1])
def test_whole_range_is_taken(number):
    seed_all(number)
    assert torch.initial_seed() == number


@pytest.mark.parametrize("wrong", [-1, 2**64, 1.0, True, "1", None])
def test_what_is_no_seed(wrong):
    with pytest.raises(OptionError, match="is no seed. Pass a whole number") as caught:
        seed_all(wrong)
    assert repr(wrong) in str(caught.value)


def test_derived_seeds_are_those_of_splitmix64():
    # The first numbers of the reference implementation in C for this seed.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [derive_seed(1234567, index) for index in range(1, 6)] == expected


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_equally_seeded_generators_come_to_draw_different_numbers():
    made = generators(7, 7, 7)
    spread_generators(made)
    drawn = [tuple(torch.rand(4, generator=generator).tolist()) for generator in made]
    assert len(set(drawn)) == 3
    assert drawn[0] == tuple(torch.rand(4, generator=generators(7)[0]).tolist())


def test_spreading_again_changes_no_state():
    made = generators(7, 7)
    spread_generators(made)
    torch.rand(4, generator=made[1])
    before = made[1].get_state()
    spread_generators(made)
    assert torch.equal(before, made[1].get_state())


def test_seed_that_the_user_gave_one_device_is_kept():
    made = generators(7, 8, 7)
    spread_generators(made)
    assert [g.initial_seed() for g in made] == [7, 8, derive_seed(7, 2)]
    for generator in made:
        generator.manual_seed(9)
    spread_generators(made)
    assert made[1].initial_seed() == derive_seed(9, 1)


@pytest.mark.parametrize("num_replicas", [1, 2, 5])
def test_cpu_replicas_are_left_alone(num_replicas):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    spread_seeds([torch.device("cpu")] * num_replicas)
    assert torch.equal(before, torch.get_rng_state())


def test_cuda_generators_are_found_by_index(monkeypatch):
    made = generators(7, 7, 7)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    spread_seeds([torch.device("cuda"), torch.device("cuda", 0)])
    assert [g.initial_seed() for g in made] == [derive_seed(7, 1), 7, 7]


@pytest.mark.gpu
def test_real_devices_draw_different_numbers_after_one_manual_seed():
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]

    def draw_all() -> list[tuple[float, ...]]:
        torch.manual_seed(11)
        spread_seeds(devices)
        return [tuple(torch.rand(4, device=device).tolist()) for device in devices]

    first = draw_all()
    assert len(set(first)) == len(devices)
    assert draw_all() == first


@pytest.mark.gpu
@pytest.mark.cards(2)
def test_real_devices_are_spread_when_seeded_before_cuda_starts():
    code = (
        "import torch, everygpu; everygpu.seed_all(11);"
        "from everygpu.devices.seed import spread_seeds;"
        "spread_seeds([torch.device('cuda', 0), torch.device('cuda', 1)]);"
        "print([generator.initial_seed() for generator in torch.cuda.default_generators[:2]])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([11, derive_seed(11, 1)])


def test_replicas_of_all_ranks_draw_different_numbers():
    torch.manual_seed(7)
    ranks = [generators(7, 7) for _ in range(3)]
    for _ in range(2):
        for rank, made in enumerate(ranks):
            spread_generators(made, 2 * rank)
    found = [g.initial_seed() for made in ranks for g in made]
    assert found == [7] + [derive_seed(7, position) for position in range(1, 6)], "as in one process with six devices"


def test_a_rank_whose_gpus_alone_were_seeded_is_spread_once():
    torch.manual_seed(7)
    made = generators(9, 9)
    for _ in range(3):
        spread_generators(made, 2)
    assert [g.initial_seed() for g in made] == [9, derive_seed(9, 3)]


@pytest.fixture
def rank_1(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    return monkeypatch


def test_the_cpu_of_each_rank_draws_its_own_numbers_from_the_first_forward_on(rank_1):
    drawn = []
    for rank, num_replicas in [(0, 1), (1, 2), (2, 2), (1, 1)]:
        rank_1.setenv("RANK", str(rank))
        seed_all(3)
        first = torch.rand(())
        for _ in range(2):
            spread_seeds([torch.device("cpu")] * num_replicas)
            drawn.append((float(first), float(torch.rand(()))))
    assert len({first for first, _ in drawn}) == 1, "what is drawn before the first forward is alike"
    assert len({later for _, later in drawn}) == len(drawn), "and is no longer from then on; nor is it drawn again"
    seed_all(3)
    torch.rand(())
    assert drawn[0][1] == float(torch.rand(())), "rank 0 is what one process is"


def test_seeding_again_is_spread_again_on_each_rank(rank_1):
    drawn = []
    for number in (3, 4, 3):
        seed_all(number)
        spread_seeds([torch.device("cpu")])
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[2] != drawn[1]


def test_a_state_that_is_put_back_is_spread_already(rank_1):
    seed_all(3)
    spread_seeds([torch.device("cpu")])
    state, then = torch.get_rng_state(), torch.rand(())
    seed_all(4)
    torch.set_rng_state(state)
    spread_seeds([torch.device("cpu")])
    assert torch.equal(torch.rand(()), then)


def draw_all():
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    gaussians = random.gauss(0, 1), np.random.randn()
    return (*draw(), *gaussians, *(torch.randn(3, device=f"cuda:{i}").tolist() for i in devices))


def saved_states():
    """The states as they come back from disk."""
    return decode(json.loads(json.dumps(encode(take_rng_states(), "rng", {}))), {})


def test_every_generator_goes_on_where_it_was():
    draw_all()  # leaves a second gaussian waiting in Python's and NumPy's generators
    states = saved_states()
    expected = draw_all()
    assert draw_all() != expected
    plan_rng_restore(states)()
    assert draw_all() == expected


def test_a_replaced_numpy_generator_survives():
    old = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        states = saved_states()
        expected = np.random.rand()
        plan_rng_restore(states)()
        assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(old)


def test_states_of_absent_devices_are_left_out(monkeypatch):
    set_on = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: set_on.append(index))
    plan_rng_restore(take_rng_states() | {"cuda": [b"x" * 16] * 4})()
    assert set_on == [0, 1]


def test_cuda_is_not_touched_where_it_is_not_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: pytest.fail("CUDA was initialised"))
    assert "cuda" not in take_rng_states()


@pytest.mark.gpu
def test_cuda_generators_go_on_where_they_were():
    draws = [torch.randn(3, device=f"cuda:{i}") for i in range(torch.cuda.device_count())]
    assert draws
    states = saved_states()
    expected = draw_all()
    plan_rng_restore(states)()
    assert draw_all() == expected
