"""``everygpu checkpoint convert``."""

import os

import pytest
import torch
from safetensors.torch import load_file

import everygpu
from tests.cli.checkpoint.conftest import make_model


@pytest.mark.parametrize("source", ["ours", "a.pt", "a.safetensors", "dcp"])
@pytest.mark.parametrize("destination", ["b.pt", "b.safetensors"])
def test_convert(call, source, destination):
    result = call("convert", source, destination)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{destination}: 7 tensors (")
    model = make_model(1)
    everygpu.load(destination, model=model)
    assert torch.equal(model.conv.weight, make_model().conv.weight)


def test_options(call):
    result = call("convert", "a.pt", "b.safetensors", "--strip-prefix", "module.")
    assert result.exit_code == 0
    assert "left out: 'epoch'" in result.stdout
    assert load_file("b.safetensors")


def test_overwrite(call):
    refused = call("convert", "ours", "a.pt")
    assert refused.exit_code == 4
    assert "Pass --overwrite" in refused.stderr
    assert call("convert", "ours", "a.pt", "--overwrite").exit_code == 0
    assert "conv.weight" in torch.load("a.pt")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["ours"], 2),
        (["ours", "b.onnx"], 2),
        (["a.pt", "b.pt", "--strip-prefix", "x."], 2),
        (["none", "b.pt"], 4),
        (["a.pt", "b.pt", "--section", "x"], 4),
    ],
)
def test_exit_codes(call, here, arguments, code):
    before = sorted(os.listdir(here))
    result = call("convert", *arguments)
    assert result.exit_code == code
    assert result.stderr
    assert sorted(os.listdir(here)) == before
