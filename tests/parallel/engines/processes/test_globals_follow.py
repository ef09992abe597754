"""Variables that forward reads outside the module have the same values in helper processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import everygpu
from tests.parallel.engines.processes import config_module, outside_model
from tests.parallel.engines.processes.outside_model import Base, Outside

X = torch.ones(4, 3)


@pytest.fixture(scope="module")
def model():
    config_module.SCALE = 2.0  # before the helper imports that module
    wrapped = everygpu.DataParallel(Outside(), device_ids=["cpu"] * 2, engine="processes")
    wrapped(X)
    yield wrapped
    config_module.SCALE = 1.0
    wrapped._engine.close()


def call(model):
    """Call the model; its two halves must be the same, and no reason was found to use threads."""
    with torch.no_grad():
        out = model(X)
    assert torch.equal(out, model.module(X))
    assert model._engine.reason is None
    return out[-1, -1].item()


def test_values_from_before_the_helper_started(model):
    assert call(model) == 2.0


def define_anew(patch):
    """Define a function once more in its module, as ``importlib.reload`` does."""
    patch.setattr(config_module, "shift", config_module.shift)
    exec("def shift(x):\n    return x * 7 + OFFSET", vars(config_module))
    patch.setattr(outside_model, "shift", config_module.shift)


CHANGES = {
    "function defined anew": define_anew,
    "float": lambda m: m.setattr(outside_model, "FACTOR", 3.0),
    "list": lambda m: outside_model.ITEMS.append(5.0) or m.setattr(outside_model, "ITEMS", [5.0]),
    "dict": lambda m: m.setitem(outside_model.WEIGHTS, "w", 3.0),
    "nested": lambda m: m.setitem(config_module.TABLE, "nested", [3.0]),
    "another module": lambda m: m.setattr(config_module, "SCALE", 9.0),
    "object": lambda m: m.setattr(outside_model.OPTIONS.inner, "gain", 9.0),
    "tensor": lambda m: m.setattr(outside_model, "MASK", torch.full((3,), 2.0)),
    "class": lambda m: m.setattr(Base, "gain", 3.0),
    "defined later": lambda m: m.setattr(outside_model, "LATER", 3.0, raising=False),
    "function": lambda m: m.setattr(outside_model, "shift", lambda x: x * 3),
    "function of another module": lambda m: m.setattr(config_module, "OFFSET", 3.0),
    "method": lambda m: m.setattr(Outside, "scale", lambda self, x: x * outside_model.FACTOR * 3),
    "default": lambda m: m.setattr(outside_model.choose, "__defaults__", ([3.0],)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_follows_and_is_undone(model, change):
    before = call(model)
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        assert call(model) != before
        patch.setattr(outside_model, "FACTOR", 0.5)  # read by code that was sent just now, too
        call(model)
    outside_model.ITEMS[1:] = []
    assert call(model) == before


def test_a_list_in_a_closure(model):
    outside_model.activate.calls.append(1)
    try:
        assert call(model) == 4.0
    finally:
        outside_model.activate.calls.clear()
    assert call(model) == 2.0


def test_a_configuration_in_an_attribute_is_compared_at_every_depth(model):
    options = model.module.options
    options.inner.gain = 3.0
    assert call(model) == 6.0
    options.gains[0].append(5.0)
    assert call(model) == 30.0
    del options.gains[0][1:]
    options.inner.gain = 1.0
    assert call(model) == 2.0


def test_an_array_in_an_attribute_is_compared_byte_by_byte(model):
    model.module.array[0] = 3.0
    assert call(model) == 6.0
    model.module.array[0] = 1.0
    assert call(model) == 2.0


@pytest.mark.usefixtures("warm_python")
def test_what_main_defines_follows():
    script = Path(__file__).with_name("main_script.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout == "all follow\n", done.stderr
