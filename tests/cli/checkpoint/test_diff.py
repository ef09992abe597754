"""``everygpu checkpoint diff``."""

import pytest
import torch


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "dcp"])
def test_the_same_model_in_another_format_is_equal(call, name):
    result = call("diff", "ours", name)
    assert result.exit_code == 0
    assert result.stdout == "7 equal, 0 different\n"


def test_differences(call):
    state = torch.load("a.pt")["state_dict"]
    state["module.conv.bias"] = state["module.conv.bias"] + 0.5
    state["module.norm.bias"] = state["module.norm.bias"].double()
    state["extra"] = state.pop("module.norm.weight")
    state["module.conv.weight"] = state["module.conv.weight"].flatten()
    torch.save(state, "b.pt")
    result = call("diff", "ours", "b.pt")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "conv.weight: shape: (3, 2, 1) and (6,)" in lines
    assert any(line.startswith("conv.bias: value: max abs 0.5, max rel ") for line in lines)
    assert "norm.bias: dtype: float32 and float64" in lines
    assert "norm.weight: only in A: float32 (3,)" in lines
    assert "extra: only in B: float32 (3,)" in lines
    assert lines[-1] == "3 equal, 5 different"


def test_tolerance(call):
    state = torch.load("a.pt")["state_dict"]
    torch.save(
        {name: tensor + 1e-4 if tensor.is_floating_point() else tensor for name, tensor in state.items()}, "b.pt"
    )
    assert call("diff", "ours", "b.pt").exit_code == 1
    result = call("diff", "ours", "b.pt", "--atol", "1e-3")
    assert result.exit_code == 0
    assert result.stdout == "1 equal, 6 within the tolerance, 0 different\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["ours"], 2), (["ours", "a.pt", "--atol", "-1"], 2), (["ours", "none"], 4), (["none", "ours"], 4)],
)
def test_exit_codes(call, arguments, code):
    result = call("diff", *arguments)
    assert result.exit_code == code
    assert result.stderr
