"""Names of parameters under any wrappers' prefixes."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import everygpu
from everygpu.keys import align_keys, bare_key, is_compiled, unwrap


@pytest.mark.parametrize(
    ("key", "bare"),
    [
        ("weight", "weight"),
        ("module.weight", "weight"),
        ("_orig_mod.module.weight", "weight"),
        ("module.encoder._orig_mod.layers.0._fsdp_wrapped_module.weight", "encoder.layers.0.weight"),
        ("modules.weight", "modules.weight"),
        ("encoder.module_list.0", "encoder.module_list.0"),
        ("", ""),
    ],
)
def test_bare_key_leaves_out_wrappers(key, bare):
    assert bare_key(key) == bare


@pytest.mark.parametrize("saved", ["", "module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."])
@pytest.mark.parametrize("wanted", ["", "module.", "_orig_mod.module."])
def test_keys_take_the_prefix_of_the_target(saved, wanted):
    aligned = align_keys({f"{saved}b": 1, f"{saved}a": 2, "module.extra": 3}, [f"{wanted}a", f"{wanted}b"])
    assert list(aligned.items()) == [(f"{wanted}b", 1), (f"{wanted}a", 2), ("module.extra", 3)]


def test_submodule_really_called_module_is_left_alone():
    inner = nn.Sequential(OrderedDict(module=nn.Linear(2, 2), weight=nn.Linear(2, 2)))
    state = inner.state_dict()
    assert list(align_keys(state, state.keys())) == list(state)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"_orig_mod.a": 1}, ["a", "module.a"]),
        ({"a": 1, "module.a": 2}, ["a", "module.a"]),
        ({"weight": 1, "module.weight": 2}, ["weight"]),
    ],
)
def test_what_could_mean_two_things_is_left_alone(state, expected):
    assert align_keys(state, expected) == state


def test_versions_of_modules_are_kept():
    state = nn.BatchNorm1d(3).state_dict()
    aligned = align_keys({f"module.{k}": v for k, v in state.items()}, state.keys())
    assert not hasattr(aligned, "_metadata")
    wrapped = OrderedDict((f"module.{k}", v) for k, v in state.items())
    wrapped._metadata = state._metadata
    assert align_keys(wrapped, state.keys())._metadata is state._metadata


def wrap_ours(module):
    return everygpu.DataParallel(module, ["cpu", "cpu"])


def compiled(module):
    return torch.compile(module, backend="eager")


def wrap_torchs(module):
    return nn.DataParallel(module, [])


@pytest.mark.parametrize(
    "wrappers",
    [
        [],
        [wrap_ours],
        [compiled],
        [compiled, wrap_ours],
        [wrap_ours, compiled],
        [wrap_torchs, compiled, wrap_ours],
    ],
    ids=lambda ws: "-".join(w.__name__ for w in ws) or "bare",
)
def test_unwrap_finds_the_users_module(wrappers):
    module = wrapped = nn.Linear(2, 2)
    for wrap in wrappers:
        wrapped = wrap(wrapped)
    assert unwrap(wrapped) is module


def test_compiled_modules_are_told():
    layer = nn.Linear(2, 2)
    assert not is_compiled(layer)
    assert is_compiled(compiled(layer))
    layer.compile(backend="eager")
    assert is_compiled(layer)


def test_unwrap_leaves_a_users_own_wrapper():
    outer = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert unwrap(outer) is outer
    assert unwrap(wrap_ours(outer)) is outer
