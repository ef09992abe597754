"""The same tensor twice, whole and as a batch of shards, and the check that nothing tells them apart."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from everygpu.parallel.sharded.batch import ShardedBatch, join, shard_batch

CPU = torch.device("cpu")


@st.composite
def row_counts(draw: Any, most: int = 40) -> list[int]:
    """Rows per shard: 1 to 9 shards, some perhaps empty, 1 to ``most`` rows in all."""
    num_rows = draw(st.integers(1, most))
    cuts = sorted(draw(st.lists(st.integers(0, num_rows), max_size=8)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, num_rows])]


def lay_out(x: Tensor, sizes: Sequence[int], dim: int = 0, devices: Sequence[torch.device] = (CPU,)) -> ShardedBatch:
    """Cut a tensor into shards, one per device in turn, connected to its graph."""
    parts = torch.split(x, list(sizes), dim)
    return shard_batch([p.to(devices[i % len(devices)]) for i, p in enumerate(parts)], x.device, dim)


@dataclass
class Rows:
    """An operand with the batch's rows on ``dim``."""

    value: Tensor
    dim: int
    as_batch: bool = True
    sizes: Sequence[int] | None = None


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers between 0.1 and 0.9 every time: in the domain of nearly every function."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.8 + 0.1
    return x.to(dtype) if dtype.is_floating_point else (x * 10).to(dtype)


def made(args: Any, sizes: Sequence[int], *, sharded: bool) -> tuple[Any, list[Tensor]]:
    """Make operands of ``Rows``, whole or as batches, with the leaves that their gradients go to."""
    leaves: list[Tensor] = []

    def make(rows: Any) -> Any:
        if isinstance(rows, Tensor):
            return rows.clone()  # it may be written
        if not isinstance(rows, Rows):
            return rows
        leaf = rows.value.clone().requires_grad_(rows.value.is_floating_point())
        leaves.append(leaf)
        x = leaf * 1 if leaf.requires_grad else leaf
        return lay_out(x, rows.sizes or sizes, rows.dim) if sharded and rows.as_batch else x

    return tree_map(make, args), leaves


def plain(x: Any) -> Any:
    return join(x) if isinstance(x, ShardedBatch) else x


def assert_like(actual: Any, expected: Any, what: str = "result") -> None:
    """Compare values, dtypes, shapes and structure."""
    ours, our_spec = tree_flatten(actual)
    theirs, their_spec = tree_flatten(expected)
    assert our_spec == their_spec, f"{what}: {our_spec} instead of {their_spec}"
    for a, b in zip(ours, theirs):
        if isinstance(b, Tensor):
            assert isinstance(a, Tensor), f"{what}: {type(a)} instead of a tensor"
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), f"{what}: {a.shape} {a.dtype}"
            assert a.requires_grad == b.requires_grad, f"{what}: requires_grad is {a.requires_grad}"
            ours_now, message = plain(a.detach()), functools.partial(str.format, what + ": {}")
            torch.testing.assert_close(ours_now, b.detach(), rtol=1e-6, atol=1e-7, equal_nan=True, msg=message)
        elif isinstance(b, np.ndarray):
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b or a is b, f"{what}: {a} instead of {b}"


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, type[BaseException] | None]:
    try:
        return function(*args, **kwargs), None
    except Exception as error:
        return None, type(error)


def weigh(result: Any) -> Tensor | None:
    """Reduce a result to one number whose gradient differs from element to element."""
    flat = [t.reshape(-1) for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    parts = [(t * torch.arange(1, t.numel() + 1, device=t.device).cos()).abs().sum() for t in flat]
    return sum(parts[1:], parts[0]).double() if parts else None


def gradients(result: Any, leaves: Iterable[Tensor], *, create_graph: bool = False) -> list[Tensor]:
    score = weigh(result)
    wanted = [x for x in leaves if x.requires_grad]
    if score is None or not wanted:
        return []
    return list(torch.autograd.grad(score, wanted, create_graph=create_graph, materialize_grads=True))


def assert_same_call(function: Callable[..., Any], args: Any, sizes: Sequence[int], *, twice: bool = False) -> None:
    """Call a function with whole operands and with batches; compare everything that can be observed.

    Args:
        args: Operands; ``Rows`` become tensors or batches.
        sizes: Rows per shard.
        twice: Compare second derivatives too.
    """
    whole_args, whole_leaves = made(args, sizes, sharded=False)
    batch_args, batch_leaves = made(args, sizes, sharded=True)
    expected, refusal = attempt(function, *whole_args)
    actual, ours = attempt(function, *batch_args)
    assert ours is refusal, f"{ours} instead of {refusal}"
    if refusal is not None:
        return
    assert_like(actual, expected)
    assert_like(batch_args, whole_args, "operands afterwards")
    first, refusal = attempt(gradients, expected, whole_leaves, create_graph=twice)
    if refusal is not None:
        return
    mine = gradients(actual, batch_leaves, create_graph=twice)
    assert_like([g.detach() for g in mine], [g.detach() for g in first], "gradient")
    if twice:
        second, refusal = attempt(gradients, first, whole_leaves)
        if refusal is None:
            assert_like(gradients(mine, batch_leaves), second, "second derivative")
