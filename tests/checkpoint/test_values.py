"""The encoder: what goes in comes out, with the same types, through real JSON."""

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from everygpu.checkpoint.values import decode, encode
from everygpu.errors import CheckpointContentError


def through_json(value: object, path: str = "extras") -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, path, tensors), allow_nan=False)
    return decode(json.loads(text), tensors)


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, at every depth and in order; nan equals nan, 0.0 differs from -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.builds(torch.tensor, st.integers(-9, 9))
)
# Text that looks like the encoder's own marks must survive too.
marks = st.sampled_from(["$tensor", "$tuple", "$dict", "$", "a.b", "", "state"])
keys = marks | st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(marks, inner, max_size=2)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=20,
)


@settings(max_examples=40)
@given(trees)
def test_decode_undoes_encode(tree: object) -> None:
    assert same(through_json(tree), tree)


def test_tensors_are_named_by_their_place() -> None:
    tensors: dict[str, Tensor] = {}
    encode({"state": {0: {"exp_avg": torch.ones(2)}}, "list": [torch.zeros(1)]}, "", tensors)
    assert list(tensors) == ["state.0.exp_avg", "list.0"]


def test_tensors_are_the_caller_s_own_memory() -> None:
    value = torch.ones(3, requires_grad=True)
    tensors: dict[str, Tensor] = {}
    encode(value, "x", tensors)
    assert tensors["x"].data_ptr() == value.data_ptr()
    assert not tensors["x"].requires_grad


class Phase(enum.IntEnum):
    WARMUP = 3


class Name(str):
    __slots__ = ()


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        {1: "int", "1": "str", 1.5: "float", "1.5": "text", None: "none", "None": "word"},
        {1: torch.tensor(1), "1": torch.tensor(2), "a.b": torch.tensor(3), "a": {"b": torch.tensor(4)}},
        [Counter({3: 2, 5: 1}), OrderedDict([("b", 1), ("a", 2)])],
        [math.inf, -math.inf, -0.0, 1e308, 5e-324, math.nan, "\ud800"],
    ],
    ids=["keys alike", "tensors of keys alike", "counter", "floats"],
)
def test_what_could_be_mixed_up_stays_apart(value: object) -> None:
    assert same(through_json(value), value)


def read_only() -> Any:
    array = np.arange(3)
    array.flags.writeable = False  # warnings are errors here
    return array


def test_a_read_only_array_and_a_parameter() -> None:
    assert through_json(read_only()).tolist() == [0, 1, 2]
    assert type(through_json(nn.Parameter(torch.ones(2)))) is Tensor


@pytest.mark.parametrize(
    "value",
    [
        *({1, 2}, len, int, torch.float32, bytearray(b"x"), np.array(["x"]), np.array([None]), 10**5000),
        *(np.datetime64("2020-01-01", "ns"), np.timedelta64(1, "ns"), np.ma.masked_array([1, 2], mask=[False, True])),
        *(np.arange(3, dtype=np.dtype(int).newbyteorder()), nn.parameter.UninitializedParameter()),
        *(torch.eye(2).to_sparse(), torch.ones(2, device="meta"), {"\ud800": torch.ones(1)}),
        *(object(), lambda: 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_place_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(TypeError, match=r"extras\.config\.1") as caught:
        encode({"config": [0, value]}, "extras", {})
    assert isinstance(caught.value, CheckpointContentError)
    assert str(caught.value).encode(), "can be printed"


@pytest.mark.parametrize("key", [object(), torch.tensor(1), (1, object()), frozenset({1})])
def test_keys_that_have_no_place_are_refused(key: object) -> None:
    with pytest.raises(CheckpointContentError, match=r"a key of extras\.config"):
        encode({"config": {key: 1}}, "extras", {})


def test_a_value_within_itself_and_a_nested_tensor_are_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointContentError, match=r"extras\.loop .*itself"):
        encode(value, "extras.loop", {})
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(CheckpointContentError, match="at extras is nested"):
        encode(nested, "extras", {})


@pytest.mark.parametrize(
    "skeleton",
    [
        *({"$unknown": 1}, {"$tensor": "missing"}, {"$tensor": ["a"]}, {"$tuple": 3}, {"$dict": [[1]]}),
        *({"$dict": [[[1], 2]]}, {"$bytes": "*"}, {"$bytes": 7}, {"$float": "x"}, {"$complex": [1]}),
    ],
    ids=str,
)
def test_skeletons_that_encode_never_makes_are_refused(skeleton: object) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)):
        decode(skeleton, {})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((Phase.WARMUP, 3), (Name("adam"), "adam"), (Point(1, 2), (1, 2)), (torch.Size([2, 3]), (2, 3))),
        *((np.float64(0.5), 0.5), (np.float32(0.5), 0.5), (np.int8(-3), -3), (np.bool_(True), True)),
        *((np.str_("x"), "x"), (defaultdict(list, {"a": [1]}), {"a": [1]})),
    ],
)
def test_subclasses_come_back_as_their_base(value: object, expected: object) -> None:
    assert same(through_json(value), expected)


@pytest.mark.parametrize(
    "array",
    [
        *(np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(6)[::-1], np.array(1.5, dtype=np.float16)),
        *(np.zeros((0, 2), dtype=np.uint32), np.array([True, False])),
    ],
)
def test_arrays_come_back_as_arrays(array: Any) -> None:
    back = through_json({"a": array})["a"]
    assert (type(back), back.dtype, back.shape) == (np.ndarray, array.dtype, array.shape)
    assert (back == array).all()
