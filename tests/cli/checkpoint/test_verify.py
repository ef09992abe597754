"""``everygpu checkpoint verify``."""

import pytest
import torch

import everygpu


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


def test_nothing_there(call):
    result = call("verify", "none")
    assert result.exit_code == 4
    assert "No checkpoint at" in result.stderr
    assert call("verify").exit_code == 2


def test_checkpoints_of_a_run_are_counted(call):
    manager = everygpu.CheckpointManager("run", every=1, model=torch.nn.Linear(1, 1))
    for step, counted in ((1, "1 checkpoint of a run"), (2, "2 checkpoints of a run")):
        manager.save(step)
        assert counted in call("verify", "run").stdout
    manager.close()
