"""Names under an outer module's prefix."""

import pytest

from everygpu.checkpoint.modules import find_prefix, rename, strip_prefix
from everygpu.errors import CheckpointMismatchError

NAMES = ["conv.weight", "conv.bias", "head.weight"]


def under(*prefixes: str) -> dict[str, int]:
    return {prefix + name: 0 for prefix in prefixes for name in NAMES}


@pytest.mark.parametrize("prefix", ["", "model.", "net.", "a.b.c."])
def test_one_prefix_is_found(prefix: str) -> None:
    assert find_prefix(under(prefix) | {"loss.weight": 0}, NAMES) == prefix


def test_segments_of_wrappers_do_not_count() -> None:
    assert find_prefix(under("model._orig_mod."), NAMES) == "model."
    assert find_prefix(under("module."), [f"_orig_mod.{name}" for name in NAMES]) == ""
    assert strip_prefix("module.model._orig_mod.conv.weight", "model.") == "conv.weight"


def test_names_that_fit_as_they_are_stay() -> None:
    assert find_prefix(under("", "ema."), NAMES) == ""


def test_a_prefix_of_less_than_half_the_names_is_chance() -> None:
    assert find_prefix({"x.conv.weight": 0}, NAMES) == ""
    assert find_prefix({}, NAMES) == ""
    assert find_prefix(under("x."), []) == ""


def test_the_prefix_that_fits_best_is_taken() -> None:
    assert find_prefix(under("model.") | {"old.conv.weight": 0, "old.conv.bias": 0}, NAMES) == "model."


def test_two_that_fit_as_well_are_not_guessed_between() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"student\., teacher\., with 3 names each"):
        find_prefix(under("student.", "teacher."), NAMES)


def test_renaming_keeps_values_and_order() -> None:
    renamed = rename({"m.b": 1, "m.a": 2, "c": 3}, lambda name: strip_prefix(name, "m."))
    assert list(renamed.items()) == [("b", 1), ("a", 2), ("c", 3)]


def test_two_names_that_would_be_one_are_refused() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"m\.a would become 'a'.*another has"):
        rename({"a": 1, "m.a": 2}, lambda name: strip_prefix(name, "m."))


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"m\. would become ''"):
        rename({"m.": 1}, lambda name: strip_prefix(name, "m."))
