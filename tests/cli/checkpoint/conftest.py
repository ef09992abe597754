"""A checkpoint in every format, and a way to call the commands on them."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from torch import nn

import everygpu
from everygpu.cli import main


def make_model(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential()
        model.add_module("conv", nn.Conv1d(2, 3, 1))
        model.add_module("norm", nn.BatchNorm1d(3))
        return model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with ``ours``, ``a.pt``, ``a.safetensors`` and ``dcp``, all of the same model."""
    monkeypatch.chdir(tmp_path)
    model = make_model()
    state = model.state_dict()
    everygpu.save("ours", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), epoch=3)
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}, "epoch": 3}, "a.pt")
    save_file(dict(state), "a.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state}, checkpoint_id="dcp", no_dist=True)
    return tmp_path


@pytest.fixture
def call(here: Path) -> Callable[..., Result]:
    """Call ``everygpu checkpoint`` there; an exception that is none of ours fails the test."""

    def invoke(*arguments: str) -> Result:
        result = CliRunner().invoke(main, ["checkpoint", *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke
