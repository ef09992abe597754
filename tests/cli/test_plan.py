"""``everygpu plan``: what a model takes of each GPU."""

import json
import re
import sys

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from everygpu.cli import main
from everygpu.cli.memory_plan import plan_memory
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
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command puts this folder first, for its own process

    def run(build, *arguments):
        return CliRunner().invoke(main, ["plan", build, "--gpus", "4", *arguments])

    return run


def test_ways_are_listed_with_what_fits(plan):
    done = plan("model.py:build", "--memory", "3MiB", "--precision", "fp32")
    assert done.exit_code == 0, done.output
    _, heads, *lines = done.output.splitlines()
    assert heads.split() == ["parameters", "gradients", "states", "whole", "activations", "sum"]
    assert lines[::2] == [
        "whole on each GPU: too large",
        'shard="optimizer": too large',
        'shard="gradients": too large',
        'shard="parameters": too large',
        'shard="parameters", checkpoint_activations="blocks": fits',
    ]
    assert max(map(len, done.output.splitlines())) < 80
    # Blocks have 64 * 256 parameters; 2 * 512 rows of 64, and no scores of 512 * 512.
    rows = [re.split(r"  +", line.strip()) for line in lines[1::2]]
    assert rows[0][:3] == ["256.0 KiB", "256.0 KiB", "512.0 KiB"]
    assert rows[3][:3] == ["64.0 KiB", "64.0 KiB", "128.0 KiB"]
    assert [row[4] for row in rows] == ["6.0 MiB"] * 4 + ["2.2 MiB"]
    assert not dist.is_initialized()


def test_a_batch_may_be_left_out(plan):
    said = plan("model.py:bare", "--memory", "1GiB", "--precision", "fp32").output
    assert "whole on each GPU: leaves 1023.0 MiB\n" in said
    assert "fits" not in said
    assert said.splitlines()[3].split()[-3] == "?"
    assert "return (model, batch)" in said
    assert "whole on each GPU: too large\n" in plan("model.py:bare", "--memory", "1KiB").output


FAILING = """
import torch
def build():
    raise {error}
class Net(torch.nn.Linear):
    def forward(self, x):
        raise {error}
def forward():
    return Net(1, 1), torch.zeros(1, 1)
"""


@pytest.mark.parametrize("function", ["build", "forward", "module"])
@pytest.mark.parametrize("error", ["OSError('the hub is down')", "PermissionError(13, 'no', 'x.json')", "KeyError(3)"])
def test_errors_of_the_users_code_are_its_own(plan, tmp_path, monkeypatch, function, error):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    text = FAILING.format(error=error)
    (tmp_path / "failing.py").write_text(f"raise {error}" if function == "module" else text)
    done = plan(f"failing.py:{function}", "--memory", "80GB")
    assert done.exit_code == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert 'failing.py", line' in done.stderr
    assert done.stderr.splitlines()[-1].startswith(error.partition("(")[0])


def test_a_file_does_not_become_the_module_of_its_name(plan, tmp_path):
    (tmp_path / "json.py").write_text(FILE)
    assert plan("json.py:build", "--memory", "80GB").exit_code == 0
    assert sys.modules["json"] is json


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
