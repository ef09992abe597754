"""Names without prefixes: removed where a wrapper put them, kept where they are the user's own."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from everygpu import DataParallel
from everygpu.checkpoint.modules import clean_names, describe_mismatch, match_names, name_cleaner, unwrap


class Encoder(nn.Module):
    """A model whose own submodule has the name that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.module(x))


OWN = {"module.weight", "module.bias", "head.weight", "head.bias"}


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda model: model,
    "dp": lambda model: nn.DataParallel(model),
    "compiled": lambda model: compiled(model),
    "compiled dp": lambda model: compiled(nn.DataParallel(model)),
    "dp of compiled": lambda model: nn.DataParallel(compiled(model)),
    "everygpu": lambda model: DataParallel(model, ["cpu", "cpu"]),
    "compiled everygpu": lambda model: compiled(DataParallel(model, ["cpu"])),
}


class SubclassOfDP(nn.DataParallel):
    pass


def stored_names(model: nn.Module) -> set[str]:
    inner = unwrap(model)
    return set(clean_names(inner, inner.state_dict()).values())


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
def test_wrappers_leave_no_trace_and_own_names_stay(wrap: Callable[[nn.Module], nn.Module]) -> None:
    assert stored_names(wrap(Encoder())) == OWN


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
def test_wrappers_inside_a_model_leave_no_trace(wrap: Callable[[nn.Module], nn.Module]) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = wrap(Encoder())
            self.module = nn.Linear(1, 1)

    expected = {f"encoder.{name}" for name in OWN} | {"module.weight", "module.bias"}
    assert stored_names(Outer()) == expected
    assert stored_names(nn.DataParallel(Outer())) == expected


def test_subclasses_of_wrappers_are_wrappers() -> None:
    assert stored_names(SubclassOfDP(Encoder())) == OWN


def test_a_wrapper_s_own_parameters_keep_both_apart() -> None:
    wrapper = SubclassOfDP(nn.Linear(2, 2))
    wrapper.weight = nn.Parameter(torch.zeros(1))
    assert stored_names(wrapper) == {"weight", "module.weight", "module.bias"}


def test_missing_children_are_passed_over() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model.register_module("absent", None)
    assert stored_names(model) == {"0.weight", "0.bias"}


def test_unwrap_gives_the_user_s_module() -> None:
    model = Encoder()
    assert unwrap(DataParallel(model, ["cpu"])) is model
    assert unwrap(model) is model


def test_paths_of_modules_are_cleaned_too() -> None:
    clean = name_cleaner(nn.DataParallel(Encoder()))
    assert clean("module.") == ""
    assert clean("module.module.") == "module."


def test_equal_names_belong_together() -> None:
    assert match_names(["a", "module.a"], ["module.a", "a"]) == {"a": "a", "module.a": "module.a"}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "module._orig_mod."])
def test_prefixes_on_either_side_are_seen_through(prefix: str) -> None:
    assert match_names([prefix + "a.w"], ["a.w"]) == {prefix + "a.w": "a.w"}
    assert match_names(["a.w"], [prefix + "a.w"]) == {"a.w": prefix + "a.w"}
    assert match_names([f"a.{prefix}w"], ["a.w"]) == {f"a.{prefix}w": "a.w"}


def test_names_with_several_partners_get_none() -> None:
    assert match_names(["module.a"], ["a", "_orig_mod.a"]) == {}
    assert match_names(["module.a", "_orig_mod.a"], ["a"]) == {}


@pytest.mark.parametrize("name", ["module", "_orig_mod", "_fsdp_wrapped_module"])
def test_a_submodule_with_a_wrapper_s_name_keeps_it(name: str) -> None:
    model = nn.Module()
    model.register_module(name, nn.Linear(1, 1))
    assert stored_names(model) == {f"{name}.weight", f"{name}.bias"}
    assert stored_names(nn.DataParallel(model)) == {f"{name}.weight", f"{name}.bias"}


names = st.lists(st.sampled_from(["module", "_orig_mod", "a", "b"]), min_size=1, max_size=4).map(".".join)


@given(st.sets(names), st.sets(names))
def test_no_name_is_used_twice_and_equal_names_always_match(saved: set[str], wanted: set[str]) -> None:
    pairs = match_names(saved, wanted)
    assert set(pairs) <= saved
    assert set(pairs.values()) <= wanted
    assert len(set(pairs.values())) == len(pairs)
    assert all(pairs[name] == name for name in saved & wanted)


def test_the_report_lists_names_with_the_nearest() -> None:
    text = describe_mismatch(["head.weight"], ["heads.weight", "zzz"], {"stem.bias": "(2,) and (3,)"})
    assert "missing in the checkpoint (1):\n    head.weight (nearest: heads.weight)" in text
    assert "unknown to the target (2):" in text
    assert "heads.weight (nearest: head.weight)" in text
    assert "stem.bias: (2,) and (3,)" in text


def test_a_long_report_is_cut_and_says_how_much() -> None:
    text = describe_mismatch([f"layer{i}" for i in range(50)], [], {})
    assert "(50)" in text
    assert "and 30 more" in text
    assert len(text.splitlines()) == 1 + 1 + 20 + 1
