"""A model that is shared out over ranks trains as on one device."""

import itertools
from functools import partial

import pytest
import torch

from everygpu.ranks.group import join
from tests.parallel.fully_sharded.training import Case, Net, sgd, train_alone, train_on_ranks
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.usefixtures("warm_python")
LEVELS = ("parameters", "gradients", "optimizer")

CASES = {
    **{
        f"{level}, {name}": Case(level=level, **options)
        for level, (name, options) in itertools.product(
            LEVELS,
            {
                "AdamW": {},
                "SGD, clipped": {"optimizer": sgd, "clip": 0.1},
                "AdamW, accumulated": {"accumulate": 3},
                "tied": {"make": partial(Net, tied=True), "clip": 0.1},
                "frozen": {"make": partial(Net, frozen=True)},
            }.items(),
        )
    },
    "even rows": Case(rows=(2, 2, 2, 2)),
    "a rank without rows": Case(rows=(3, 0, 2, 1)),
    "recomputed": Case(options={"checkpoint_activations": "blocks"}),
    "wrap": Case(options={"wrap": [torch.nn.Linear]}),
}


def train_all():
    group = join()
    found = {}
    for name, case in CASES.items():
        losses, state = train_on_ranks(case, group.rank, group.size)
        found[name] = losses, state
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_train_as_one_device(size, tmp_path):
    results = run_ranks(train_all, size=size, folder=tmp_path)
    for name, case in CASES.items():
        losses, state = train_alone(case, size)
        of_ranks = [result[name][0] for result in results]
        for step, (loss, norm) in enumerate(losses):
            weights = torch.tensor(case.rows[:size], dtype=torch.float64)
            mean = sum(w * of_rank[step][0] for w, of_rank in zip(weights, of_ranks) if w) / weights.sum()
            assert mean == pytest.approx(loss, rel=1e-4), name
            assert [of_rank[step][1] for of_rank in of_ranks] == pytest.approx([norm] * size, rel=1e-4), name
        for _, found in (result[name] for result in results):
            assert found.keys() == state.keys(), name
            for key, value in state.items():
                torch.testing.assert_close(found[key], value, rtol=2e-4, atol=2e-5, msg=f"{name}: {key}")
