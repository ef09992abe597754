"""Which kinds of batches are captured, and which captures go."""

import random

import pytest

from everygpu.parallel.cuda_graphs import batch_kinds
from everygpu.parallel.cuda_graphs.batch_kinds import LONG_WINDOW, NUM_WARM_UPS, BatchKinds


def run(kinds, stream):
    """Train on batches of these kinds; return the kinds of which each capture was made, and how many steps had one."""
    captured, made, num_hits = set(), [], 0
    for key in stream:
        kinds.come_again(key)
        if key not in captured and kinds.is_due(key):
            captured.discard(kinds.kind_to_evict())
            captured.add(key)
            made.append(key)
            kinds.note_use(key)
        elif key in captured:
            num_hits += 1
            kinds.note_use(key)
    assert captured == set(kinds._captured)
    return made, num_hits


@pytest.fixture
def kinds(monkeypatch):
    monkeypatch.setattr(batch_kinds, "MAX_CAPTURES", 3)
    return BatchKinds("TrainStep", [])


def test_further_kinds_are_captured_when_they_come_again(kinds):
    made, _ = run(kinds, ["a"] * NUM_WARM_UPS + ["b"] * NUM_WARM_UPS)
    assert made == []
    made, _ = run(kinds, ["a", "b", "c", "c", "d"])
    assert made == ["a", "b", "c"]


def test_kinds_in_turn_replace_none(kinds):
    """Each would take the place of the one that is next."""
    made, num_hits = run(kinds, ["a", "b", "c", "d"] * 50)
    assert len(made) == 3
    assert num_hits > 130


def test_what_is_no_longer_used_goes(kinds):
    made, _ = run(kinds, ["a", "b", "c"] * 10 + ["d", "e", "f"] * 10)
    assert sorted(made) == ["a", "b", "c", "d", "e", "f"]
    assert set(kinds._captured) == {"d", "e", "f"}


@pytest.mark.parametrize("seed", range(20))
def test_random_kinds_are_not_captured_again_and_again(monkeypatch, seed):
    draw = random.Random(seed)
    most = draw.choice([4, 16, 64])
    monkeypatch.setattr(batch_kinds, "MAX_CAPTURES", most)
    weights = [1 / (i + 1) ** draw.choice([0, 1, 2]) for i in range(draw.choice([most // 2, most, 3 * most]))]
    stream = draw.choices(range(len(weights)), weights, k=5000)
    made, num_hits = run(BatchKinds("TrainStep", []), stream)
    share = sum(sorted(weights)[-most:]) / sum(weights)
    assert num_hits > 0.7 * share * len(stream) - 3 * len(weights)
    assert len(made) < most + 0.1 * len(stream)


def test_one_line_says_how_many_shapes_there_are(kinds, caplog):
    draw = random.Random(0)
    run(kinds, ["a"] * 10 + [draw.randrange(300) for _ in range(2 * LONG_WINDOW)])
    (record,) = caplog.records
    assert "TrainStep: batches of some shapes run without CUDA graphs: " in record.getMessage()
    assert "pad_to_multiple_of=64" in record.getMessage()


def test_most_steps_eager_is_said_where_there_is_room(caplog):
    draw, kinds = random.Random(0), BatchKinds("TrainStep", [])
    kinds.note_use("a")
    for _ in range(LONG_WINDOW):
        kinds.come_again(draw.randrange(10**6))
    (record,) = caplog.records
    assert f"{LONG_WINDOW} of {LONG_WINDOW:,}, of " in record.getMessage()
