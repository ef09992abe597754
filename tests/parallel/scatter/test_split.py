"""How many rows each replica gets, and how many there are to share."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everygpu import Replicated
from everygpu.parallel.scatter.split import SplitPlan, plan_split

rows_of_a_batch = st.integers(0, 200)
device_counts = st.integers(1, 64)


@st.composite
def weight_lists(draw):
    weights = draw(st.lists(st.floats(0, 1e6), min_size=1, max_size=16))
    return [draw(st.floats(0.1, 1e6)), *weights[1:]]


@given(num_rows=rows_of_a_batch, num_devices=device_counts)
def test_chunk_gives_the_sizes_of_torch_chunk(num_rows, num_devices):
    sizes = [len(part) for part in torch.empty(num_rows).chunk(num_devices)]
    plan = plan_split(num_rows, num_devices)
    assert plan.rows == (*sizes, *[0] * (num_devices - len(sizes)))


@pytest.mark.parametrize(
    ("num_rows", "num_devices", "split", "rows"),
    [
        (30, 2, "chunk", (15, 15)),
        (30, 8, "chunk", (4, 4, 4, 4, 4, 4, 4, 2)),
        (10, 3, "chunk", (4, 4, 2)),
        (10, 8, "chunk", (2, 2, 2, 2, 2, 0, 0, 0)),
        (10, 8, "even", (2, 2, 1, 1, 1, 1, 1, 1)),
        (9, 8, "chunk", (2, 2, 2, 2, 1, 0, 0, 0)),
        (2, 3, "even", (1, 1, 0)),
        (0, 3, "chunk", (0, 0, 0)),
        (0, 3, "even", (0, 0, 0)),
        (0, 2, [1, 3], (0, 0)),
        (12, 3, [1, 2, 3], (2, 4, 6)),
        (12, 3, (1, 0, 0.5), (8, 0, 4)),
        (5, 2, [0.01, 1], (1, 4)),
        (1, 2, [0.01, 1], (1, 0)),
        (7, 1, [0.001], (7,)),
        (10, 3, torch.tensor([1.0, 1.0, 2.0]), (2, 3, 5)),
    ],
)  # fmt: skip
def test_examples(num_rows, num_devices, split, rows):
    assert plan_split(num_rows, num_devices, split).rows == rows


@given(num_rows=rows_of_a_batch, num_devices=device_counts)
def test_even_shares_differ_by_one_row_at_most(num_rows, num_devices):
    rows = plan_split(num_rows, num_devices, "even").rows
    assert len(rows) == num_devices
    assert sum(rows) == num_rows
    assert max(rows) - min(rows) <= 1
    assert list(rows) == sorted(rows, reverse=True)


@given(num_rows=rows_of_a_batch, weights=weight_lists())
def test_weighted_shares_are_within_a_row_of_exact(num_rows, weights):
    rows = plan_split(num_rows, len(weights), weights).rows
    assert sum(rows) == num_rows
    assert rows[0] > 0 or num_rows == 0
    for share, weight in zip(rows, weights):
        exact = num_rows * weight / math.fsum(weights)
        assert abs(share - exact) <= (1 if num_rows * weights[0] / math.fsum(weights) > 0.5 else 1.5) + 1e-6
        assert share >= 0
        assert share == 0 or weight > 0


@given(rows=st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_replicas_with_rows_run_or_the_first_alone(rows):
    plan = SplitPlan(tuple(rows))
    assert plan.num_rows == sum(rows)
    assert plan.active == (tuple(i for i in range(len(rows)) if rows[i] > 0) if any(rows) else (0,))


def test_replicated_shows_what_it_holds():
    assert repr(Replicated([1, 2])) == "Replicated([1, 2])"
