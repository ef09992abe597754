"""Every rule gives what the operation gives on the joined tensor, and runs on the parts alone."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from everygpu.parallel.sharded.batch import ShardedBatch, has_shards
from everygpu.parallel.sharded.dispatch import operations
from everygpu.parallel.sharded.rules import in_place, pointwise
from tests.parallel.batches import Rows, assert_same_call, made, numbers, row_counts

PROPERTY = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
RULES = ShardedBatch._dispatch.rules
TAGGED = """
abs acosh add.Tensor add.Scalar add_ addcdiv addcmul_ bitwise_and bitwise_xor_ clamp clamp_min_ copysign div div_
eq.Scalar exp fmod.Tensor ge gelu_backward hypot isnan leaky_relu lerp logical_or logit maximum mul.Tensor mul_
nan_to_num ne.Tensor neg_ pow.Tensor_Scalar pow.Scalar relu relu_ remainder round rsqrt sigmoid_backward softplus sqrt_
sub.Tensor tanh_backward threshold_backward trunc xlogy
"""
RULED = {op for op, rule in RULES.items() if rule is not None and not any(x in str(op) for x in ("loss", "cross_"))}
OPERATIONS = sorted({*RULED, *operations(TAGGED)}, key=str)
"""Without losses, which ``test_losses`` tries."""
C, T = 4, 3  # features besides the rows

# Operands for each operation.

SCALARS = {"alpha": 1, "beta": 1, "is_result": False, "self_is_result": False, "approximate": "tanh", "decimals": 1}
CONTIGUOUS = torch.contiguous_format
WITH_0_DIM = ("fill_.Tensor", "masked_fill.Tensor", "masked_fill_.Tensor")


def shape_of(num_rows: int, dim: int) -> list[int]:
    return [num_rows, C, T] if dim == 0 else [C, num_rows, T]


def elementwise_args(op: Any, num_rows: int, dim: int, kind: str) -> tuple[list[Any], dict[str, Any]]:
    """Make arguments from the schema; the second tensor is of a kind, the others are like the first."""
    args: list[Any] = []
    named: dict[str, Any] = {}
    for argument in op._schema.arguments:
        value = argument_value(op, argument, num_rows, dim, kind if any(isinstance(a, Rows) for a in args) else "rows")
        if value is not None or not argument.has_default_value():
            if argument.kwarg_only:
                named[argument.name] = value
            else:
                args.append(value)
    return args, named


def argument_value(op: Any, argument: Any, num_rows: int, dim: int, kind: str) -> Any:
    name, of = argument.name, str(argument.type)
    if name == "rounding_mode":
        return "floor"
    if name in SCALARS:
        return SCALARS[name]
    if of in ("number", "Optional[number]"):
        return 3 if "bitwise" in str(op) else 0.5
    if of not in ("Tensor", "Optional[Tensor]"):
        return None
    dtype = torch.bool if name in ("mask", "condition") else torch.int64 if "bitwise" in str(op) else torch.float64
    if name == "value" and any(text in str(op) for text in WITH_0_DIM):
        return numbers(dtype=dtype)
    return operand(kind, num_rows, dim, dtype, seed=len(name))


KINDS = (
    "rows",
    "whole",
    "features",
    "row column",
    "one row",
    "one number",
    "no dimensions",
    "other layout",
    "more dims",
)


def operand(kind: str, num_rows: int, dim: int, dtype: torch.dtype, seed: int) -> Any:
    full = shape_of(num_rows, dim)
    shapes = {
        "features": full[dim + 1 :],
        "row column": [n if d == dim else 1 for d, n in enumerate(full)],
        "one row": [1 if d == dim else n for d, n in enumerate(full)],
        "one number": [1],
        "no dimensions": [],
        "more dims": [2, *full],
    }
    made = numbers(*shapes.get(kind, full), seed=seed, dtype=dtype)
    if kind == "other layout":
        return Rows(made, dim, sizes=[num_rows, 0])
    if kind == "more dims":
        return Rows(made, dim + 1)
    return Rows(made, dim, as_batch=kind == "rows" or (kind == "row column" and num_rows % 2 == 0))


def index(num_rows: int, dim: int, of: int) -> Rows:
    shape = [n if d != 2 else 2 for d, n in enumerate(shape_of(num_rows, dim))]
    return Rows(torch.arange(shape[0] * shape[1] * 2).reshape(shape) % of, dim, as_batch=num_rows % 2 == 0)


def x_of(num_rows: int, dim: int, seed: int = 0) -> Rows:
    return Rows(numbers(*shape_of(num_rows, dim), seed=seed), dim)


def matrix(num_rows: int, seed: int = 0) -> Rows:
    return Rows(numbers(num_rows, C, seed=seed), 0)


def mask(num_rows: int, dim: int) -> Rows:
    return Rows(numbers(*shape_of(num_rows, dim)) > 0.5, dim)


def over(*rest: Any, first: tuple[Any, ...] = ()) -> list[Any]:
    return [
        lambda n, d: (x_of(n, d), *first, 2, *rest),
        lambda n, d: (x_of(n, d), *first, 1 - d, *rest),
        lambda n, d: (x_of(n, d), *first, d - 3, *rest),
    ]


def over_several(*, first: tuple[Any, ...] = ()) -> list[Any]:
    dims = [[0, 2], [0, 1], [2, -2], [-1], []]
    return [lambda n, d, dim=dim, keep=keep: (x_of(n, d), *first, dim, keep) for dim in dims for keep in (True, False)]


everything = [lambda n, d: (x_of(n, d),), lambda n, d: (matrix(n),), lambda n, d: (Rows(numbers(n), 0),)]
truth = [lambda n, d: (mask(n, d),), lambda n, d: (Rows(torch.zeros(n, 2, dtype=torch.bool), 0),)]
resized = [lambda n, d: (x_of(n, d), [2, n]), lambda n, d: (x_of(n, d), shape_of(n, d))]
VIEWS = [
    lambda n, d: (x_of(n, 0), [-1, T]),
    lambda n, d: (x_of(n, 0), [n * C, T]),
    lambda n, d: (x_of(n, 0), [n, -1]),
    lambda n, d: (x_of(n, 0), [n, 2, C // 2, T]),
    lambda n, d: (x_of(n, 0), [-1]),
    lambda n, d: (x_of(n, 0), [1, n, C * T]),
    lambda n, d: (x_of(n, 1), [2, C // 2, n, T]),
    lambda n, d: (x_of(n, 1), [C, n * T]),
    lambda n, d: (x_of(n, 1), [-1, T]),
    lambda n, d: (x_of(n, 0), [T, -1]),
    lambda n, d: (x_of(n, 0), [5, 5]),
]
CALLS: dict[str, list[Any]] = {
    "_softmax.default": over(False),
    "_log_softmax.default": over(False),
    "_softmax_backward_data.default": [lambda n, d: (x_of(n, d), x_of(n, d, 1), 2, torch.float64)],
    "_log_softmax_backward_data.default": [lambda n, d: (x_of(n, d), x_of(n, d, 1), 2, torch.float64)],
    "cumsum.default": over(),
    "cumprod.default": over(),
    "sort.default": [*over(), *over(True), lambda n, d: (x_of(n, d),)],
    "sort.stable": [lambda n, d: (x_of(n, d), {"stable": True}), lambda n, d: (x_of(n, d), {"stable": True, "dim": d})],
    "topk.default": [lambda n, d, rest=rest: (x_of(n, d), *rest) for rest in ((2,), (1, 0), (1, 1), (2, 2, False))],
    "gather.default": [
        lambda n, d: (x_of(n, d), 2, index(n, d, T)),
        lambda n, d: (x_of(n, d), 2, torch.zeros(1, 1, 1, dtype=torch.int64)),
        lambda n, d: (x_of(n, d), d, torch.zeros(1, 1, 1, dtype=torch.int64)),
    ],
    "scatter_add.default": [lambda n, d: (x_of(n, d), 2, index(n, d, T), x_of(n, d, 1))],
    "scatter.src": [lambda n, d: (x_of(n, d), 2, index(n, d, 1), x_of(n, d, 1))],
    "scatter.value": [lambda n, d: (x_of(n, d), 2, index(n, d, T), 2.0)],
    "argmax.default": [*over(), *over(True), lambda n, d: (x_of(n, d),)],
    "argmin.default": [*over(), *over(True)],
    "max.dim": [*over(), *over(True)],
    "min.dim": [*over(), *over(True)],
    "logsumexp.default": over_several()[:8],
    "prod.dim_int": [*over(), *over(True)],
    "var.correction": [*over(), lambda n, d: (x_of(n, d), [2], {"correction": 0, "keepdim": True})],
    "std.correction": [*over(), lambda n, d: (x_of(n, d), [2], {"correction": 2})],
    "linalg_vector_norm.default": [*over_several(first=(3,)), lambda n, d: (x_of(n, d),)],
    "norm.ScalarOpt_dim": over_several(first=(3,)),
    **{f"{name}.dim": [lambda n, d: (mask(n, d), 2), lambda n, d: (mask(n, d), d, True)] for name in ("any", "all")},
    **{f"{name}.dims": [lambda n, d, at=at: (mask(n, d), [at]) for at in (0, 1, 2)] for name in ("any", "all")},
    **{f"{name}.default": truth for name in ("any", "all")},
    **{f"{name}.default": everything for name in ("sum", "mean", "max", "min")},
    "sum.dim_IntList": [*over_several(), lambda n, d: (x_of(n, d), [d], {"dtype": torch.float32})],
    "mean.dim": [*over_several(), lambda n, d: (x_of(n, d), None)],
    **{f"{name}.default": [*over_several(), *everything] for name in ("amax", "amin")},
    "cat.default": [
        lambda n, d: ([x_of(n, d), x_of(n, d, 1)], 2),
        lambda n, d: ([x_of(n, d), numbers(*shape_of(n, d)).float()], -1),
        lambda n, d: ([x_of(n, d), numbers(*shape_of(n, d))], d),
        lambda n, d: ([x_of(n, d), numbers(0)], 2),
    ],
    "stack.default": [lambda n, d, dim=dim: ([x_of(n, d), x_of(n, d, 1)], dim) for dim in (0, 1, 2, 3, -1)],
    **{f"{name}.default": [lambda n, d: (x_of(n, d),)] for name in ("alias", "detach", "ones_like", "zeros_like")},
    "empty_like.default": [lambda n, d: (x_of(n, d),)],
    "clone.default": [lambda n, d, named=named: (x_of(n, d), named) for named in ({}, {"memory_format": CONTIGUOUS})],
    "_to_copy.default": [
        lambda n, d: (x_of(n, d), {"dtype": torch.float32}),
        lambda n, d: (x_of(n, d), {"device": torch.device("cpu"), "dtype": torch.int64}),
    ],
    "full_like.default": [lambda n, d: (x_of(n, d), 3), lambda n, d: (x_of(n, d), True, {"dtype": torch.bool})],
    **{f"{name}.default": resized for name in ("new_zeros", "new_ones", "new_empty")},
    "new_full.default": [lambda n, d: (x_of(n, d), shape_of(n, d), 7), lambda n, d: (x_of(n, d), [2], 7)],
    "t.default": [lambda n, d: (matrix(n),), lambda n, d: (Rows(numbers(n), 0),)],
    "transpose.int": [lambda n, d, dims=dims: (x_of(n, d), *dims) for dims in ((0, 2), (0, 1), (1, 1), (-1, 1))],
    "permute.default": [lambda n, d: (x_of(n, d), [2, 0, 1]), lambda n, d: (x_of(n, d), [-1, -2, 0])],
    "unsqueeze.default": [lambda n, d, at=at: (x_of(n, d), at) for at in (-4, -1, 0, 1, 2, 3)],
    "squeeze.default": [lambda n, d: (Rows(numbers(1, n, 1), 1),), lambda n, d: (Rows(numbers(n, 1), 0),)],
    "squeeze.dim": [lambda n, d, at=at: (Rows(numbers(1, n, 1), 1), at) for at in (0, 1, 2, -1)],
    "squeeze.dims": [lambda n, d, at=at: (Rows(numbers(1, n, 1), 1), at) for at in ([0], [0, 1], [0, 1, 2], [2])],
    "select.int": [lambda n, d, at=at: (x_of(n, d), at, 0) for at in (0, 1, 2, -1)],
    "slice.Tensor": [
        lambda n, d: (x_of(n, d), 2, 1),
        lambda n, d: (x_of(n, d), 2, 0, -1, 2),
        lambda n, d: (x_of(n, d), d, 1),
        lambda n, d: (x_of(n, d), 1 - d, 1, 99),
    ],
    "expand.default": [
        lambda n, d: (Rows(numbers(n, 1), 0), [n, 5]),
        lambda n, d: (Rows(numbers(n, 1), 0), [-1, 5]),
        lambda n, d: (Rows(numbers(n, 1), 0), [2, n, 5]),
        lambda n, d: (Rows(numbers(1, n), 1), [3, -1]),
        lambda n, d: (Rows(numbers(1), 0, sizes=[0, 1]), [4]),
    ],
    "split.Tensor": [lambda n, d, at=at: (x_of(n, d), 2, at) for at in (0, 1, 2, -1)],
    "split_with_sizes.default": [lambda n, d: (x_of(n, d), [1, 2], 2), lambda n, d: (x_of(n, d), [n], d)],
    "unbind.int": [lambda n, d, at=at: (x_of(n, d), at) for at in (0, 1, 2, -1)],
    "view.default": VIEWS,
    "select_backward.default": [
        lambda n, d: (Rows(numbers(n, C), 0), [n, T, C], 1, 2),
        lambda n, d: (Rows(numbers(C, n), 1), [C, n, T], -1, 0),
        lambda n, d: (Rows(numbers(C, n), 1), [T, C, n], 0, 0),
        lambda n, d: (Rows(numbers(n, C), 0), [T, n, C], 0, -1),
        lambda n, d: (Rows(numbers(n), 0), [2, n], 0, 0),
    ],
    "slice_backward.default": [
        lambda n, d: (Rows(numbers(*shape_of(n, d)), d), [*shape_of(n, d)[:2], 5], 2, 1, 4, 1),
        lambda n, d: (Rows(numbers(*shape_of(n, d)), d), [*shape_of(n, d)[:2], 6], -1, 1, 9, 2),
        lambda n, d: (Rows(numbers(n, C), 0), [n + 1, C], 0, 1, n + 1, 1),
    ],
    "_unsafe_view.default": VIEWS,
}  # fmt: skip


def name_of(op: Any) -> str:
    return str(op).removeprefix("aten.")


def calls(op: Any, num_rows: int, dim: int) -> list[tuple[list[Any], dict[str, Any]]]:
    """Return the arguments to try: positional, named. An operation without any fails the test."""
    if RULES[op] in (pointwise, in_place):
        takes_two = sum("Tensor" in str(a.type) for a in op._schema.arguments) > 1
        return [elementwise_args(op, num_rows, dim, kind) for kind in (KINDS if takes_two else KINDS[:1])]
    found = [list(make(num_rows, dim)) for make in CALLS[name_of(op)]]
    return [(c[:-1], c[-1]) if isinstance(c[-1], dict) else (c, {}) for c in found]


def run(op: Any, kwargs: dict[str, Any]) -> Any:
    if "empty" in str(op):
        return lambda *args: torch.zeros_like(op(*args, **kwargs))  # the values are anything
    return lambda *args: op(*args, **kwargs)


@pytest.mark.parametrize("op", OPERATIONS, ids=name_of)
class TestOperations:
    @PROPERTY
    @given(sizes=row_counts(12), dim=st.integers(0, 1), data=st.data())
    def test_gives_what_the_joined_tensor_gives(self, op: Any, sizes: list[int], dim: int, data: Any) -> None:
        args, kwargs = data.draw(st.sampled_from(calls(op, sum(sizes), dim)))
        assert_same_call(run(op, kwargs), args, sizes, twice=data.draw(st.booleans()))

    def test_every_call_on_uneven_shards(self, op: Any) -> None:
        for dim in (0, 1):
            found = calls(op, 6, dim)
            if RULES[op] in (pointwise, in_place):  # one rule for all of them: each has a third of the kinds
                found = found[OPERATIONS.index(op) % 3 :: 3] or found
            for args, kwargs in found:
                assert_same_call(run(op, kwargs), args, [4, 0, 2], twice=True)

    def test_runs_on_the_parts(self, op: Any) -> None:
        assert any(stays(op, *call, dim) for dim in (0, 1) for call in calls(op, 6, dim))


def stays(op: Any, args: list[Any], kwargs: dict[str, Any], dim: int) -> bool:
    """Whether an operation runs without any of its operands being joined."""
    batch_args, _ = made(args, [3, 1, 2], sharded=True)
    with torch.no_grad():
        try:
            op(*batch_args, **kwargs)
        except (RuntimeError, IndexError, ValueError):
            return False
    batches = [a for a in tree_leaves(batch_args) if isinstance(a, ShardedBatch)]
    return bool(batches) and all(b._joined.tensor is None and has_shards(b) for b in batches)
