"""``everygpu checkpoint``: show, verify and convert, on a checkpoint in every format."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import nn

import everygpu
from everygpu.cli import main
from tests.checkpoint.poison import must_not_run


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


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("no-such-verb", 2),
        ("show", 2),
        ("show none", 4),
        ("show .", 4),
        (f"show {'a' * 300}", 4),
        ("verify", 2),
        ("verify none", 4),
        ("convert ours", 2),
        ("convert ours b.onnx", 2),
        ("convert a.pt b.pt --strip-prefix x.", 2),
        ("convert none b.pt", 4),
        ("convert a.pt b.pt --section x", 4),
        ("convert ours a.pt", 2),
    ],
)
def test_exit_codes(call, here, arguments, code):
    before = sorted(os.listdir(here))
    result = call(*arguments.split())
    assert result.exit_code == code
    assert result.stderr
    assert result.stdout == ""
    assert sorted(os.listdir(here)) == before


def test_a_tilde_is_the_home_where_no_shell_has_replaced_it(call, here, monkeypatch):
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(here / "home"))
    shutil.copytree("ours", here / "home" / "last")
    for verb in (["show"], ["verify"], ["convert", "~/last"]):
        assert call(*verb, "~/new.pt" if "convert" in verb else "~/last").exit_code == 0
    assert (here / "home" / "new.pt").exists()


@pytest.mark.usefixtures("warm_python")
def test_names_are_shown_where_the_output_has_no_letters_for_them(here):
    torch.save({"poids.é✓": torch.ones(1)}, here / "é.pt")
    environ = {**os.environ, "PYTHONPATH": str(Path(everygpu.__file__).parents[1]), "PYTHONIOENCODING": "ascii"}
    for verb in ("show", "verify"):
        done = subprocess.run(
            [sys.executable, "-m", "everygpu", "checkpoint", verb, "é.pt"],
            cwd=here,
            env=environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert r"\xe9" in done.stdout


TENSORS = """\
tensors: 7, 22 values, 92 B
conv.weight  float32 (3, 2, 1)  24 B
conv.bias  float32 (3,)  12 B
norm.weight  float32 (3,)  12 B
norm.bias  float32 (3,)  12 B
norm.running_mean  float32 (3,)  12 B
norm.running_var  float32 (3,)  12 B
norm.num_batches_tracked  int64 ()  8 B
"""


def test_ours(call):
    out = call("show", "ours").stdout
    lines = out.splitlines()
    assert lines[0] == "format: everygpu"
    assert f"torch {torch.__version__.partition('+')[0]}" in lines[1]  # a wheel may leave out what comes after the plus
    assert lines[2:4] == ["optimizer: 1 group, state of 0 parameters, lr 0.1", "epoch: 3"]
    assert out.endswith(f"epoch: 3\n{TENSORS}")


@pytest.mark.parametrize(
    ("name", "words"),
    [("a.safetensors", "safetensors"), ("dcp", "torch.distributed.checkpoint"), ("a.pt", "torch.save")],
)
def test_others(call, name, words):
    out = call("show", name).stdout
    assert out.splitlines()[0] == f"format: {words}"
    assert "tensors: 7, 22 values, 92 B" in out
    assert "conv.weight  float32 (3, 2, 1)  24 B" in out


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
    assert "tensors: 2, 200 values, 400 B" in call("show", "tied.pt").stdout


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


@pytest.mark.parametrize("name", ["ours", "a.pt", "a.safetensors", "dcp"])
def test_valid(call, name):
    result = call("verify", name)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{name}: valid (")
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


@pytest.mark.parametrize(
    "name", ["ours/model.safetensors", "a.pt", "a.safetensors", "dcp/.metadata", "dcp/__0_0.distcp"]
)
def test_truncated_is_four_and_says_what(call, here, name):
    path = here / name
    path.write_bytes(path.read_bytes()[:-10])
    top, _, file = name.partition("/")
    result = call("verify", top)
    assert result.exit_code == 4
    assert (file or top) in result.stdout
    assert result.stdout.endswith(f"{top}: invalid\n")


def test_checkpoints_of_a_run_are_counted(call):
    manager = everygpu.CheckpointManager("run", every=1, model=torch.nn.Linear(1, 1))
    for step, counted in ((1, "1 checkpoint of a run"), (2, "2 checkpoints of a run")):
        manager.save(step)
        assert counted in call("verify", "run").stdout
    manager.close()


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
    assert refused.exit_code == 2
    assert "Pass --overwrite" in refused.stderr
    assert call("convert", "ours", "a.pt", "--overwrite").exit_code == 0
    assert "conv.weight" in torch.load("a.pt")
