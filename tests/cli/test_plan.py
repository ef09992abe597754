"""``everygpu plan``: what a model takes of each GPU."""

import re

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from everygpu.cli import main
from everygpu.parallel.fully_sharded.plan import plan_memory
from tests.parallel.fully_sharded.training import VOCABULARY, Net

FILE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64, bias=False)
    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))

def bare():
    @dataclass  # which looks for the module of its annotations
    class Sizes:
        blocks: int = 4
    return nn.Sequential(*(Block() for _ in range(Sizes().blocks)))

def build():
    return bare(), torch.zeros(2, 512, 64)

def wrong():
    return 3
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)

    def run(build, *arguments):
        return CliRunner().invoke(main, ["plan", build, "--gpus", "4", *arguments])

    return run


def test_ways_are_listed_with_what_fits(plan):
    done = plan("model.py:build", "--memory", "3MiB", "--precision", "fp32")
    assert done.exit_code == 0, done.output
    rows = [re.split(r"  +", line.strip()) for line in done.output.splitlines()[2:]]
    assert [row[0] for row in rows] == [
        "whole on each GPU",
        'shard="optimizer"',
        'shard="gradients"',
        'shard="parameters"',
        'shard="parameters", checkpoint_activations="blocks"',
    ]
    # Blocks have 64 * 256 parameters; 2 * 512 rows of 64, and no scores of 512 * 512.
    assert rows[0][1:4] == ["256.0 KiB", "256.0 KiB", "512.0 KiB"]
    assert rows[3][1:4] == ["64.0 KiB", "64.0 KiB", "128.0 KiB"]
    assert [row[5] for row in rows] == ["6.0 MiB"] * 4 + ["2.2 MiB"]
    assert [row[-1] for row in rows] == ["too large"] * 4 + ["fits"]
    assert not dist.is_initialized()


def test_a_batch_may_be_left_out(plan):
    assert "Activations aren't counted" in plan("model.py:bare", "--memory", "80GB").output


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("model.py", "names no function"),
        ("model.py:nothing", "No function 'nothing'"),
        ("nowhere.py:build", "No file 'nowhere.py'"),
        ("nowhere:build", "No module 'nowhere'"),
        ("model.py:wrong", "returns int"),
    ],
)
def test_what_is_no_model_is_refused(plan, build, message):
    done = plan(build, "--memory", "80GB")
    assert done.exit_code == 2
    assert message in done.output


def test_shares_are_those_of_the_first_rank():
    """Of uneven rows, the largest; frozen and tied parameters count as what they are."""
    with torch.device("meta"):
        model, ids = Net(tied=True), torch.zeros(2, 4, dtype=torch.long)
    model.blocks[0].requires_grad_(False)
    whole, *_, least, _ = plan_memory(model, lambda module: module(ids), 3, "fp32")
    block = 6 * 2 + 7 * 6 + 7 + 6 * 7 + 6
    assert whole.parameters == 4 * (3 * block + VOCABULARY * 6 + 12)
    assert whole.gradients == 4 * (2 * block + VOCABULARY * 6 + 12)
    share = 2 + 2 + 3 * 6 + 3 + 2 * 7 + 2
    assert least.parameters == 4 * (3 * share + 4 * 6 + 4)
    assert least.states == 2 * least.gradients == 8 * (2 * share + 4 * 6 + 4)
