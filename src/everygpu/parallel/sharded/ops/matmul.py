"""Products with a matrix that every part needs whole, and products whose sum is over the rows."""

from typing import Any

from torch import Tensor

from everygpu.parallel.sharded.batch import Args, Kwargs, Rule, ShardedBatch, has_parts, parts_of, wrap
from everygpu.parallel.sharded.operands import add_up, cut_alike, each, everywhere, frame_of, rules_for, spread


def matrix_product(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``mm``, ``mv``: rows times a matrix, a matrix times columns, or a sum over the rows."""
    a, b = args
    a_dim, b_dim = _row_dim(a), _row_dim(b)
    if a_dim == a.ndim - 1 or b_dim == 0:
        return _sum_of_products(func, a, b)
    if (a_dim is None) == (b_dim is None):
        return NotImplemented
    layout = (b if a_dim is None else a)._layout
    columns = [everywhere(a, layout), parts_of(b)] if a_dim is None else [parts_of(a), everywhere(b, layout)]
    parts = each(func, columns, kwargs, layout)
    return NotImplemented if parts is None else wrap(parts, layout, 1 if a_dim is None else 0)


def _row_dim(x: Tensor) -> int | None:
    return x.shard_dim if isinstance(x, ShardedBatch) and has_parts(x) else None


def _sum_of_products(func: Any, a: Tensor, b: Tensor) -> Any:
    """The gradient of a weight: rows on the inner dimension of both."""
    frame = frame_of(b if _row_dim(b) == 0 else a)
    if frame is None:
        return NotImplemented
    columns = [cut_alike(a, frame._replace(from_right=1)), cut_alike(b, frame._replace(from_right=b.ndim))]
    parts = each(func, columns, {}, frame.layout)
    return NotImplemented if parts is None else add_up(parts, frame.layout)


def affine(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``addmm``: rows times a matrix, plus a bias."""
    bias, a, b = args
    frame = frame_of(a)
    if frame is None or frame.from_right != 2 or _row_dim(b) is not None or bias.ndim > 2:
        return NotImplemented
    columns = [spread(bias, frame), parts_of(a), everywhere(b, frame.layout)]
    parts = each(func, columns, kwargs, frame.layout)
    return NotImplemented if parts is None else wrap(parts, frame.layout, 0)


def batched_product(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``bmm``, one product a row."""
    frame = frame_of(*args)
    if frame is None or frame.from_right != 3:
        return NotImplemented
    parts = each(func, [cut_alike(a, frame) for a in args], kwargs, frame.layout)
    return NotImplemented if parts is None else wrap(parts, frame.layout, 0)


MATMUL: dict[Any, Rule] = rules_for(
    (matrix_product, "mm.default mv.default"), (affine, "addmm.default"), (batched_product, "bmm.default")
)
