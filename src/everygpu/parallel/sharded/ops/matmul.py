"""Matrix products: rows times a matrix that every part needs whole, and products that sum over the rows."""

from typing import Any

from torch import Tensor

from everygpu.parallel.sharded.batch import ShardedBatch, has_parts, parts_of, wrap
from everygpu.parallel.sharded.dispatch import Args, Kwargs, Rule, rules_for
from everygpu.parallel.sharded.operands import (
    call_on_parts,
    replicate_operand,
    shard_operand,
    shard_rows,
    shared_spec,
    sum_parts,
)


def matmul(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``mm``, ``mv``: rows times a matrix, a matrix times columns, or a sum over the rows."""
    a, b = args
    a_dim, b_dim = _row_dim(a), _row_dim(b)
    if a_dim == a.ndim - 1 or b_dim == 0:
        return _sum_of_products(func, a, b)
    if (a_dim is None) == (b_dim is None):
        return NotImplemented
    layout = (b if a_dim is None else a)._layout
    columns = (
        [replicate_operand(a, layout), parts_of(b)] if a_dim is None else [parts_of(a), replicate_operand(b, layout)]
    )
    parts = call_on_parts(func, columns, kwargs, layout)
    return NotImplemented if parts is None else wrap(parts, layout, 1 if a_dim is None else 0)


def _row_dim(x: Tensor) -> int | None:
    return x.shard_dim if isinstance(x, ShardedBatch) and has_parts(x) else None


def _sum_of_products(func: Any, a: Tensor, b: Tensor) -> Any:
    """The gradient of a weight: rows on the inner dimension of both."""
    spec = shared_spec(b if _row_dim(b) == 0 else a)
    if spec is None:
        return NotImplemented
    columns = [shard_rows(a, spec._replace(from_right=1)), shard_rows(b, spec._replace(from_right=b.ndim))]
    parts = call_on_parts(func, columns, {}, spec.layout)
    return NotImplemented if parts is None else sum_parts(parts, spec.layout)


def addmm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``addmm``: rows times a matrix, plus a bias."""
    bias, a, b = args
    spec = shared_spec(a)
    if spec is None or spec.from_right != 2 or _row_dim(b) is not None or bias.ndim > 2:
        return NotImplemented
    columns = [shard_operand(bias, spec), parts_of(a), replicate_operand(b, spec.layout)]
    parts = call_on_parts(func, columns, kwargs, spec.layout)
    return NotImplemented if parts is None else wrap(parts, spec.layout, 0)


def bmm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``bmm``, one product a row."""
    spec = shared_spec(*args)
    if spec is None or spec.from_right != 3:
        return NotImplemented
    parts = call_on_parts(func, [shard_rows(a, spec) for a in args], kwargs, spec.layout)
    return NotImplemented if parts is None else wrap(parts, spec.layout, 0)


MATMUL: dict[Any, Rule] = rules_for((matmul, "mm.default mv.default"), (addmm, "addmm.default"), (bmm, "bmm.default"))
