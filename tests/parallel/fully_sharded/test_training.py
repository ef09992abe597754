"""A model that is shared out over ranks trains as on one device."""

import itertools
from functools import partial

import pytest
import torch

from everygpu.ranks.group import join
from tests.parallel.fully_sharded.training import Case, Net, sgd, step_on_ranks, train_alone, train_on_ranks
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
    "a rank without rows": Case(rows=(3, 0, 2, 1), clip=0.1),
    "recomputed": Case(options={"checkpoint_activations": "blocks"}),
    "compiled": Case(options={"engine": "compile", "checkpoint_activations": "blocks"}),
    "wrap": Case(options={"wrap": [torch.nn.Linear]}),
    "bf16": Case(options={"precision": "bf16"}, optimizer=sgd, clip=0.1),
}
IN_STEPS = [name for name in CASES if not name.startswith(("gradients", "compiled"))]
CLOSE = {"bf16": {"rtol": 0.05, "atol": 0.005}}


def eagerly(function):
    return function


def train_all():
    group = join()
    torch.compile = eagerly  # blocks are compiled in tests of their own
    loops = {name: train_on_ranks(case, group.rank, group.size) for name, case in CASES.items()}
    steps = {name: step_on_ranks(CASES[name], group.rank, group.size) for name in IN_STEPS}
    return loops, steps


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_train_as_one_device(size, tmp_path):
    results = run_ranks(train_all, size=size, folder=tmp_path)
    for name, case in CASES.items():
        close = CLOSE.get(name, {"rtol": 2e-4, "atol": 2e-5})
        losses, state = train_alone(case, size)
        check_losses(name, [loops[name][0] for loops, _ in results], losses, case.rows[:size], close)
        for (_, found), _ in ((loops[name], steps) for loops, steps in results):
            check_states(name, found, state, close)
        if name not in IN_STEPS:
            continue
        losses, state = train_alone(case, size, as_step=True)
        for found, found_state in (steps[name] for _, steps in results):
            assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in losses], rel=close["rtol"]), name
            assert [norm for _, norm in found] == pytest.approx([norm for _, norm in losses], rel=close["rtol"]), name
            check_states(f"{name} in steps", found_state, state, close)


def check_losses(name, of_ranks, losses, rows, close):
    weights = torch.tensor(rows, dtype=torch.float64)
    for step, (loss, norm) in enumerate(losses):
        mean = sum(w * found[step][0] for w, found in zip(weights, of_ranks) if w) / weights.sum()
        assert mean == pytest.approx(loss, rel=close["rtol"]), name
        assert [found[step][1] for found in of_ranks] == pytest.approx([norm] * len(rows), rel=close["rtol"]), name


def check_states(name, found, state, close):
    assert found.keys() == state.keys(), name
    for key, value in state.items():
        torch.testing.assert_close(found[key], value, **close, msg=f"{name}: {key}")
