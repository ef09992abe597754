"""Random training programs on several ranks give what they give on one device."""

from dataclasses import replace

import pytest
import torch

import everygpu
from everygpu.ranks.group import init_group
from tests.parallel.programs.program import on_ranks
from tests.parallel.programs.run import differences, run_program
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.usefixtures("warm_python")

CPU = torch.device("cpu")


def check(seed):
    """Return what differs, of all but gradients and what is seen of a rank's own rows."""
    program, rank, size = on_ranks(seed), init_group().rank, init_group().size
    options = {**program.options, "split": "chunk", "buffers": "first"}
    theirs = run_program(replace(program, by_step=False), lambda module: module, CPU)
    ours = run_program(
        replace(program, share=(rank, size)), lambda m: everygpu.DataParallel(m, [CPU] * (1 + seed % 3), **options), CPU
    )
    names = [name for name in theirs if name not in ("seen", "captures", "model's gradients")]
    return differences({n: ours[n] for n in names}, {n: theirs[n] for n in names}, program.dtype)


def check_all(seeds):
    return {seed: lines for seed in seeds if (lines := check(seed))}


@pytest.mark.parametrize(
    ("size", "seeds"), [(2, range(12)), *(pytest.param(n, range(12, 240), marks=pytest.mark.slow) for n in (2, 3))]
)
def test_programs(tmp_path, size, seeds):
    assert run_ranks(check_all, seeds, size=size, folder=tmp_path) == [{}] * size
