"""Names: without prefixes where a wrapper put them, kept where they are the user's own, found under an outer one's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import everygpu
from everygpu.checkpoint.states import clean_names, find_prefix, rename, strip_prefix, unwrap
from everygpu.errors import CheckpointMismatchError
from everygpu.keys import match_names
from tests.checkpoint.models import WRAPPERS, compiled, same_state, snapshot


class Encoder(nn.Module):
    """A model whose own submodule has the name that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.module(x))


OWN = {"module.weight", "module.bias", "head.weight", "head.bias"}
WRAPS = WRAPPERS | {"dp of compiled": lambda model: nn.DataParallel(compiled(model))}


class SubclassOfDP(nn.DataParallel):
    pass


def stored_names(model: nn.Module) -> set[str]:
    inner = unwrap(model)
    return set(clean_names(inner, inner.state_dict()).values())


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=list(WRAPS))
def test_wrappers_leave_no_trace_and_own_names_stay(wrap: Callable[[nn.Module], nn.Module]) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = wrap(Encoder())
            self.module = nn.Linear(1, 1)

    assert stored_names(wrap(Encoder())) == OWN
    expected = {f"encoder.{name}" for name in OWN} | {"module.weight", "module.bias"}
    assert stored_names(Outer()) == expected
    assert stored_names(nn.DataParallel(Outer())) == expected


def test_subclasses_of_wrappers_are_wrappers_and_their_own_parameters_stay_apart() -> None:
    assert stored_names(SubclassOfDP(Encoder())) == OWN
    wrapper = SubclassOfDP(nn.Linear(2, 2))
    wrapper.weight = nn.Parameter(torch.zeros(1))
    wrapper.register_module("absent", None)
    assert stored_names(wrapper) == {"weight", "module.weight", "module.bias"}


@pytest.mark.parametrize("name", ["module", "_orig_mod", "_fsdp_wrapped_module"])
def test_a_submodule_with_a_wrapper_s_name_keeps_it(name: str) -> None:
    model = nn.Module()
    model.register_module(name, nn.Linear(1, 1))
    assert stored_names(model) == {f"{name}.weight", f"{name}.bias"}
    assert stored_names(nn.DataParallel(model)) == {f"{name}.weight", f"{name}.bias"}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "module._orig_mod."])
def test_prefixes_on_either_side_are_seen_through(prefix: str) -> None:
    assert match_names([prefix + "a.w"], ["a.w"]) == {prefix + "a.w": "a.w"}
    assert match_names(["a.w"], [prefix + "a.w"]) == {"a.w": prefix + "a.w"}
    assert match_names([f"a.{prefix}w"], ["a.w"]) == {f"a.{prefix}w": "a.w"}


def test_names_with_several_partners_get_none() -> None:
    assert match_names(["module.a"], ["a", "_orig_mod.a"]) == {}
    assert match_names(["module.a", "_orig_mod.a"], ["a"]) == {}


names = st.lists(st.sampled_from(["module", "_orig_mod", "a", "b"]), min_size=1, max_size=4).map(".".join)


@given(st.sets(names), st.sets(names))
def test_no_name_is_used_twice_and_equal_names_always_match(saved: set[str], wanted: set[str]) -> None:
    pairs = match_names(saved, wanted)
    assert set(pairs) <= saved
    assert set(pairs.values()) <= wanted
    assert len(set(pairs.values())) == len(pairs)
    assert all(pairs[name] == name for name in saved & wanted)


# Under an outer module's prefix.

NAMES = ["conv.weight", "conv.bias", "head.weight"]


def under(*prefixes: str) -> list[str]:
    return [prefix + name for prefix in prefixes for name in NAMES]


@pytest.mark.parametrize(
    ("saved", "expected", "prefix"),
    [
        *(([*under(prefix), "loss.weight"], NAMES, prefix) for prefix in ("", "model.", "a.b.c.")),
        (under("model._orig_mod."), NAMES, "model."),
        (under("module."), [f"_orig_mod.{name}" for name in NAMES], ""),
        (under("", "ema."), NAMES, ""),
        ([*under("model."), "old.conv.weight", "old.conv.bias"], NAMES, "model."),
        (["x.conv.weight"], NAMES, ""),  # less than half of the names is chance
        ([], NAMES, ""),
        (under("x."), [], ""),
    ],
)
def test_one_prefix_is_found(saved: list[str], expected: list[str], prefix: str) -> None:
    assert find_prefix(saved, expected) == prefix


def test_two_that_fit_as_well_are_not_guessed_between() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"student\., teacher\., with 3 names each"):
        find_prefix(under("student.", "teacher."), NAMES)


def test_renaming_keeps_order_and_refuses_names_that_would_be_one() -> None:
    assert strip_prefix("module.model._orig_mod.conv.weight", "model.") == "conv.weight"
    renamed = rename({"m.b": 1, "m.a": 2, "c": 3}, lambda name: strip_prefix(name, "m."))
    assert list(renamed.items()) == [("b", 1), ("a", 2), ("c", 3)]
    for state, match in (
        ({"a": 1, "m.a": 2}, r"m\.a would become 'a'.*another has"),
        ({"m.": 1}, "m. would become ''"),
    ):
        with pytest.raises(CheckpointMismatchError, match=match):
            rename(state, lambda name: strip_prefix(name, "m."))


# Modules that are not quite the saved one.


class Pretrained(nn.Module):
    """An encoder and a head."""

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, num_classes)


@pytest.fixture
def source() -> Pretrained:
    model = Pretrained()
    model.encoder(torch.randn(8, 3))
    return model


@pytest.fixture
def path(tmp_path: Path, source: Pretrained) -> Path:
    return everygpu.save(tmp_path / "ckpt", model=source, ema=source)


def assert_refused(path: Path, target: nn.Module, named: str, **options: Any) -> None:
    before = snapshot(target)
    with pytest.raises(CheckpointMismatchError, match=named):
        everygpu.load(path, model=target, **options)
    assert same_state(snapshot(target), before)


def test_a_prefix_selects_a_part_of_the_model_alone(path: Path, source: Pretrained) -> None:
    head, ema = nn.Linear(4, 5), Pretrained()
    everygpu.load(path, model=head, ema=ema, prefix="head.")
    assert same_state(snapshot(head, ema), snapshot(source.head, source))
    assert_refused(path, head, r"the prefix 'haed\.'; they are encoder\.0\.weight", prefix="haed.")
    assert_refused(path, nn.Linear(4, 6), r"weight: \(5, 4\) in the checkpoint, \(6, 4\)", prefix="head.")


def test_tensors_of_other_shapes_are_left_out_and_logged(path: Path, source: Pretrained, caplog) -> None:
    target = Pretrained(num_classes=7)
    head = snapshot(target.head)
    assert_refused(path, target, r"2 of another shape.*ignore_mismatched=True")
    everygpu.load(path, model=target, ignore_mismatched=True)
    assert same_state(snapshot(target.encoder), snapshot(source.encoder))
    assert same_state(snapshot(target.head), head)
    assert "of another shape (2):" in caplog.text
    assert "head.weight: (5, 4) in the checkpoint, (7, 4) in the target" in caplog.text
    target.neck = nn.Linear(1, 1)
    assert_refused(path, target, r"2 missing, 0 unknown and 0 of another shape", ignore_mismatched=True)
    everygpu.load(path, model=target, ignore_mismatched=True, strict=False)


class Newer(nn.Module):
    """Its values of before version 2 were a hundredth of what they are now."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict[f"{prefix}weight"] = 100 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("is_ours", [True, False])
def test_modules_learn_their_saved_version(tmp_path: Path, is_ours: bool) -> None:
    def saved(name: str, source: nn.Module) -> Path:
        path = tmp_path / name
        everygpu.save(path, model=source) if is_ours else torch.save(source.state_dict(), path)
        return path

    inner = nn.Sequential(Newer())
    for name, source in {"bare": inner, "wrapped": nn.DataParallel(inner), "part": nn.ModuleDict({"x": inner})}.items():
        for target in (nn.Sequential(Newer()), nn.DataParallel(nn.Sequential(Newer()))):
            everygpu.load(saved(name, source), model=target)
            assert next(target.parameters()).tolist() == [1, 1]


class Named(nn.Linear):
    """Its version is no number, as that of ``transformers``' Phi-3."""

    _version = "0.0.5"  # type: ignore[assignment]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        self.seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("version", ["0.0.5", 1.5, (1, 2)], ids=str)
def test_a_version_may_be_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool, version: Any
) -> None:
    monkeypatch.setattr(Named, "_version", version)
    source, path = nn.Sequential(Named(2, 2)), tmp_path / "checkpoint"
    everygpu.save(path, model=source) if is_ours else torch.save(source.state_dict(), path)
    target, other = nn.Sequential(Named(2, 2)), nn.Sequential(Newer())
    everygpu.load(path, model=target)
    assert target[0].seen == version
    assert torch.equal(target[0].weight, source[0].weight)
    other[0].weight = nn.Parameter(torch.zeros(2, 2))
    everygpu.load(path, model=other, strict=False)  # compares its version with a number
    assert torch.equal(other[0].weight, 100 * source[0].weight)
