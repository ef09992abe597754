"""``everygpu checkpoint show``."""

import json

import pytest
import torch
from torch import nn

from tests.checkpoint.poison import must_not_run

TREE = """\
├── conv  2 tensors, 9 values, 36 B
│   ├── weight  float32 (3, 2, 1)  24 B
│   └── bias  float32 (3,)  12 B
└── norm  5 tensors, 13 values, 56 B
    ├── weight  float32 (3,)  12 B
    ├── bias  float32 (3,)  12 B
    ├── running_mean  float32 (3,)  12 B
    ├── running_var  float32 (3,)  12 B
    └── num_batches_tracked  int64 ()  8 B
"""


def test_ours(call):
    out = call("show", "ours").stdout
    lines = out.splitlines()
    assert lines[0] == "format: everygpu"
    assert f"torch {torch.__version__.partition('+')[0]}" in lines[1]  # a wheel may leave out what comes after the plus
    assert lines[2:5] == [
        "optimizer: 1 group, state of 0 parameters, lr 0.1",
        "epoch: 3",
        "ours  7 tensors, 22 values, 92 B",
    ]
    assert out.endswith(TREE)


@pytest.mark.parametrize(
    ("name", "words"),
    [("a.safetensors", "safetensors"), ("dcp", "torch.distributed.checkpoint"), ("a.pt", "torch.save")],
)
def test_others(call, name, words):
    out = call("show", name).stdout
    assert out.splitlines()[0] == f"format: {words}"
    assert f"{name}  7 tensors, 22 values, 92 B" in out
    assert "── weight  float32 (3, 2, 1)  24 B" in out


def test_depth(call):
    assert "conv" not in call("show", "ours", "--depth", "0").stdout
    out = call("show", "ours", "--depth", "1").stdout
    assert "├── conv  2 tensors" in out
    assert "weight" not in out


def test_json(call):
    record = json.loads(call("show", "a.pt", "--json").stdout)
    assert (record["path"], record["format"], record["section"]) == ("a.pt", "torch.save", "state_dict")
    assert (record["num_tensors"], record["num_values"], record["size_bytes"]) == (7, 22, 92)
    assert record["tensors"][0] == {
        "name": "module.conv.weight",
        "dtype": "float32",
        "shape": [3, 2, 1],
        "size_bytes": 24,
    }
    assert record["parts"] == {"epoch": 3}
    assert json.loads(call("show", "ours", "--json").stdout)["parts"].keys() == {"optimizer", "epoch"}


def test_tied_tensors_are_counted_once(call):
    first = nn.Linear(10, 10, bias=False)
    second = nn.Linear(10, 10, bias=False)
    second.weight = first.weight
    torch.save(nn.Sequential(first, second).state_dict(), "tied.pt")
    assert "tied.pt  2 tensors, 200 values, 400 B" in call("show", "tied.pt").stdout


def test_a_section_can_be_shown(call):
    torch.save({"G": {"g": torch.ones(1)}, "D": {"d": torch.ones(2)}}, "gan.pt")
    out = call("show", "gan.pt").stdout
    assert "no model: several models under names of its own: 'G', 'D'" in out
    assert "d  float32 (2,)" in call("show", "gan.pt", "--section", "D").stdout
    assert call("show", "gan.pt", "--section", "X").exit_code == 4


def test_names_can_t_command_the_terminal(call):
    torch.save({"w\x1b[31m.\x9b2J\n": torch.ones(1), "[red]x": torch.ones(1), "e": "\x1b[0m"}, "evil.pt")
    result = call("show", "evil.pt")
    assert "\x1b" not in result.output
    assert "\x9b" not in result.output
    assert r"w\x1b[31m" in result.stdout
    assert "[red]x" in result.stdout
    torch.save({"\x1b[31m": {"w": torch.ones(1)}, "b": {"w": torch.ones(1)}}, "evil2.pt")
    failed = call("convert", "evil2.pt", "out.pt")
    assert failed.exit_code == 4
    assert "\x1b" not in failed.output


def test_nothing_is_run(call, here):
    with must_not_run(here) as poison:
        torch.save({"w": poison}, "poison.pt")
        result = call("show", "poison.pt")
    assert result.exit_code == 4
    assert "wants to run" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["none"], 4), ([], 2), (["ours", "--depth", "-1"], 2), (["ours", "--no-such"], 2), (["."], 4)],
)
def test_exit_codes(call, arguments, code):
    result = call("show", *arguments)
    assert result.exit_code == code
    assert result.stderr
