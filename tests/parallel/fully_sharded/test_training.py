"""A model that is sharded over ranks trains as on one device."""

import itertools
from functools import partial

import pytest
import torch

from everygpu.ranks.group import init_group
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
    "synced": Case(make=partial(Net, synced=True), optimizer=sgd, clip=0.1),
    "even rows": Case(rows=(2, 2, 2, 2)),
    "a rank without rows": Case(rows=(3, 0, 2, 1), clip=0.1),
    "recomputed": Case(options={"checkpoint_activations": "blocks"}),
    "compiled": Case(options={"engine": "compile", "checkpoint_activations": "blocks"}),
    "wrap": Case(options={"wrap": [torch.nn.Linear]}),
    "bf16": Case(options={"precision": "bf16"}, optimizer=sgd, clip=0.1),
}
CLOSE = {"bf16": {"rtol": 0.05, "atol": 0.005}}
FEW = [
    name for name in CASES if name.startswith("parameters") or ("," not in name and name not in ("compiled", "wrap"))
]
FEW.append("optimizer, AdamW, accumulated")
FEW_STEPS = ["parameters, tied", "synced", "gradients, AdamW, accumulated", "a rank without rows", "bf16"]
STEPS = [name for name in CASES if name != "compiled"]


def eagerly(function):
    return function


def train_all(loops, steps):
    group = init_group()
    torch.compile = eagerly  # what the compiler makes of blocks is tried on GPUs
    return [
        {name: train_on_ranks(CASES[name], group.rank, group.size, as_step=as_step) for name in names}
        for names, as_step in ((loops, False), (steps, True))
    ]


@pytest.mark.parametrize(
    ("size", "loops", "steps"),
    [(2, FEW, FEW_STEPS), *(pytest.param(size, list(CASES), STEPS, marks=pytest.mark.slow) for size in (2, 4))],
)
def test_ranks_train_as_one_device(size, loops, steps, tmp_path):
    results = run_ranks(train_all, loops, steps, size=size, folder=tmp_path)
    for name in loops:
        case, close = CASES[name], CLOSE.get(name, {"rtol": 2e-4, "atol": 2e-5})
        losses, state = train_alone(case, size)
        check_losses(name, [found[name][0] for found, _ in results], losses, case.rows[:size], close)
        for found, _ in results:
            check_states(name, found[name][1], state, close)
    for name in steps:
        case, close = CASES[name], CLOSE.get(name, {"rtol": 2e-4, "atol": 2e-5})
        losses, state = train_alone(case, size, as_step=True)
        for _, found in results:
            for column in (0, 1):
                expected = pytest.approx([row[column] for row in losses], rel=close["rtol"])
                assert [row[column] for row in found[name][0]] == expected, name
            check_states(f"{name}, by TrainStep", found[name][1], state, close)


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
