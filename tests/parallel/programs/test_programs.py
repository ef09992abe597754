"""200 random training programs give by every engine what they give on one device."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.programs.blocks import BLOCKS
from tests.parallel.programs.network import CALLS, STEMS
from tests.parallel.programs.program import CELLS, KINDS, LOSSES, OPTIMIZERS, draw_program
from tests.parallel.programs.run import NUM_PROGRAMS, SETUPS, check_seeds, differences, run_program
from tests.parallel.programs.training import EVENTS, LOOPS

CPU = torch.device("cpu")
GROUP = 10
QUICK = {"capture": [0], "step": [20], "step-captured": [30], "step-loss-on-host": [10]}
"""The groups that are no slow tests, by their first seeds."""
CASES = [
    pytest.param(
        name,
        range(first, first + GROUP),
        marks=[*setup.marks, *([] if first in QUICK.get(name, [0, 10]) else [pytest.mark.slow])],
        id=f"{name}-{first}-{first + GROUP - 1}",
    )
    for name, setup in SETUPS.items()
    for first in range(0, setup.num_programs, GROUP)
]


@pytest.mark.parametrize(("setup", "seeds"), CASES)
def test_programs(setup: str, seeds: range) -> None:
    reports, num_graphs = check_seeds(setup, seeds)
    if reports:
        pytest.fail("\n".join(reports), pytrace=False)
    assert bool(num_graphs) is SETUPS[setup].captures


def test_every_feature_is_drawn() -> None:
    found = Counter(itertools.chain.from_iterable(draw_program(seed).features for seed in range(NUM_PROGRAMS)))
    flags = {
        "autocast",
        "counted steps",
        "gradient accumulation",
        "batches that grow",
        "zeroed gradients",
        "wrapped stem",
        "fewer rows than devices",
    }
    named = {*BLOCKS, *LOOPS, *EVENTS, *CALLS, *STEMS, *CELLS, *KINDS, *LOSSES, *OPTIMIZERS, *flags}
    assert {name: found[name] for name in sorted(named) if found[name] < 4} == {}


def spoil_weights(m: nn.Module, args: tuple[Tensor, ...]) -> None:
    m.bias.data.add_(1e-6)


SPOIL = {
    "outputs": lambda head: head.register_forward_hook(lambda m, args, out: out * (1 + 1e-6)),
    "gradients": lambda head: head.bias.register_hook(lambda grad: grad * (1 + 1e-6)),
    "weights": lambda head: head.register_forward_pre_hook(spoil_weights),
}


@pytest.mark.parametrize("what", SPOIL)
def test_what_is_wrong_is_seen(what: str) -> None:
    for seed in range(8):
        program = replace(draw_program(seed), autocast=False, wraps_stem=False)

        def wrap(module: nn.Module) -> nn.Module:
            SPOIL[what](module.head)
            return module

        runs = [run_program(program, way, CPU) for way in (wrap, lambda module: module)]
        assert differences(*runs, program.dtype)


def test_a_failure_says_how_to_run_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: nn.Module, *args: object, **kwargs: object) -> None:
        raise RuntimeError("\n".join(["what it is", *map(str, range(40)), "advice"]))

    monkeypatch.setattr("everygpu.DataParallel.forward", fail)
    (report,), _ = check_seeds("threads", range(7, 8))
    assert draw_program(7).describe() in report
    assert "RuntimeError: what it is" in report
    assert "in fail" in report
    assert "python -m tests.parallel.programs 7 --setup threads" in report
