"""Comparing two states: what is missing, of another shape or dtype, and by how much values differ."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from everygpu.checkpoint.compare import Difference, compare

NAN = math.nan


def differ(a: Any, b: Any, **tolerance: float) -> Difference | None:
    found = compare({"w": a}, {"w": b}, **tolerance)
    assert found.num_equal + found.num_close + len(found.differences) == 1
    return found.differences[0] if found.differences else None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.tensor([NAN, 1.0, math.inf]),
        torch.tensor(3),
        torch.ones(0, 2),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.eye(3).to_sparse(),
    ],
    ids=str,
)
def test_a_copy_is_equal(tensor: Tensor) -> None:
    assert differ(tensor, tensor.clone()) is None


def test_zeros_of_both_signs_and_all_nans_are_equal() -> None:
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert differ(torch.tensor([0.0]), torch.tensor([-0.0])) is None
    assert differ(torch.tensor([NAN]), other_nan) is None


def test_how_much_values_differ() -> None:
    found = differ(torch.tensor([1.0, 2.0, -4.0]), torch.tensor([1.0, 2.5, -4.25]))
    assert found == Difference(name="w", kind="value", max_abs=0.5, max_rel=0.2)


def test_one_nan_is_an_infinite_difference() -> None:
    found = differ(torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0]))
    assert found is not None
    assert (found.max_abs, found.max_rel) == (math.inf, math.inf)


def test_equal_infinities_beside_a_difference() -> None:
    found = differ(torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 2.0]))
    assert found == Difference(name="w", kind="value", max_abs=1.0, max_rel=0.5)


def test_large_whole_numbers_are_not_blurred() -> None:
    assert differ(torch.tensor([2**60]), torch.tensor([2**60 + 1])) is not None


def test_shape_and_dtype() -> None:
    assert differ(torch.ones(2), torch.ones(3)) == Difference(name="w", kind="shape", detail="(2,) and (3,)")
    assert differ(torch.ones(2), torch.ones(2).half()) == Difference(
        name="w", kind="dtype", detail="float32 and float16"
    )


@pytest.mark.parametrize(
    ("tolerance", "is_close"), [({"atol": 0.2}, True), ({"rtol": 0.2}, True), ({"atol": 0.05}, False)]
)
def test_tolerance(tolerance: dict[str, float], is_close: bool) -> None:
    found = compare({"w": torch.tensor([1.0])}, {"w": torch.tensor([1.1])}, **tolerance)
    assert (found.num_close == 1) is is_close
    assert (found.differences == ()) is is_close


def test_names_on_one_side() -> None:
    found = compare({"a": torch.ones(1), "b": torch.ones(2)}, {"b": torch.ones(2), "c": torch.ones(3, 1)})
    assert found.num_equal == 1
    assert [(d.name, d.kind, d.detail) for d in found.differences] == [
        ("a", "only in A", "float32 (1,)"),
        ("c", "only in B", "float32 (3, 1)"),
    ]


def test_segments_of_wrappers_make_no_difference() -> None:
    found = compare({"module.a.w": torch.ones(1)}, {"a._orig_mod.w": torch.ones(1)})
    assert (found.num_equal, found.differences) == (1, ())


def test_extra_state() -> None:
    assert differ({"calls": 1}, {"calls": 1}) is None
    found = differ({"calls": 1}, {"calls": 2})
    assert found is not None
    assert found.kind == "value"


@pytest.mark.parametrize("kind", [lambda tensor: tensor, lambda tensor: tensor.numpy()], ids=["tensor", "array"])
def test_tensors_in_extra_state_are_compared_whole(kind: Any) -> None:
    a = torch.zeros(5000)
    b = a.clone()
    b[2500] = 1e-9
    assert differ({"scale": [kind(a)], "n": 1}, {"scale": [kind(a.clone())], "n": 1}) is None
    for other in (b, b[:3], a.double()):
        assert differ({"scale": [kind(a)]}, {"scale": [kind(other)]}) is not None


def test_progress_is_told_for_every_entry() -> None:
    steps: list[int] = []
    compare({"a": torch.ones(1), "b": torch.ones(1)}, {"c": torch.ones(1)}, advance=steps.append)
    assert sum(steps) == 3
