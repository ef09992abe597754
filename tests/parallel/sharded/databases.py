"""torch's own databases of operators and modules: each call with plain tensors, and with batches in their place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from everygpu.errors import EveryGPUError
from everygpu.parallel.sharded.batch import ShardedBatch
from tests.parallel.batches import lay_out, plain


def cut(num_rows: int) -> list[int]:
    """Cut rows unevenly over two shards; the second may be empty."""
    second = num_rows // 3 or num_rows // 2
    return [num_rows - second, second]


def is_row_tensor(x: Any) -> bool:
    return type(x) is Tensor and x.layout == torch.strided and x.ndim > 0 and not x.is_quantized


def choices(tree: Any) -> dict[str, list[int]]:
    """Say which leaves of a call become batches."""
    found = [i for i, leaf in enumerate(tree_leaves(tree)) if is_row_tensor(leaf)]
    named = {"first": found[:1], "second": found[1:2], "all": found}
    return {name: places for i, (name, places) in enumerate(named.items()) if places and (i < 2 or len(places) > 1)}


class Operands:
    """The operands of a call, fresh: leaves that gradients go to, and the tree of operands made of them."""

    def __init__(self, tree: Any, places: list[int], dim: int = 0) -> None:
        values, spec = tree_flatten(tree)
        self.leaves: list[Tensor] = []
        self.tree = tree_unflatten([self._make(v, i in places, dim) for i, v in enumerate(values)], spec)

    def _make(self, value: Any, is_batch: bool, dim: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not is_row_tensor(value):
            return value.detach().clone().requires_grad_(value.requires_grad)
        leaf = value.detach().clone().requires_grad_(value.requires_grad)
        self.leaves.append(leaf)
        x = leaf * 1 if leaf.requires_grad else leaf
        dim = min(dim, x.ndim - 1)
        return lay_out(x, cut(x.shape[dim]), dim) if is_batch else x


def call(function: Callable[..., Any], tree: Any) -> tuple[Any, BaseException | None]:
    (first, args, kwargs) = tree
    torch.manual_seed(0)
    try:
        return function(first, *args, **kwargs), None
    except Exception as error:
        return None, error


def differences(
    function: Callable[..., Any], tree: Any, places: list[int], dim: int = 0, grads: bool = False
) -> str | None:
    """Call a function on plain operands, and with some of them as batches; say what differs, or None."""
    whole, mine = Operands(tree, []), Operands(tree, places, dim)
    expected, refusal = call(function, whole.tree)
    actual, error = call(function, mine.tree)
    if isinstance(error, EveryGPUError):
        return None
    if refusal is not None or error is not None:
        if refusal is None:
            return f"raises {type(error).__name__}: {str(error)[:300]}"
        if error is None:
            return f"does not raise {type(refusal).__name__}: {str(refusal)[:100]}"
        if type(error) is not type(refusal):
            return f"raises {type(error).__name__} {str(error)[:200]} instead of {type(refusal).__name__}: {str(refusal)[:100]}"
        if str(error) != str(refusal):
            return f"~message {str(error)[:200]!r} instead of {str(refusal)[:200]!r}"
        return None
    found = compare(actual, expected) or compare(mine.tree, whole.tree, "operands")
    if found or not grads:
        return found
    theirs, refusal = gradients(expected, whole.leaves)
    ours, error = gradients(actual, mine.leaves)
    if refusal is not None or error is not None:
        if isinstance(error, EveryGPUError) or type(error) is type(refusal):
            return None
        return f"gradient raises {error!r:.300} instead of {refusal!r:.200}"
    return compare(ours, theirs, "gradient")


def gradients(result: Any, leaves: list[Tensor]) -> tuple[Any, BaseException | None]:
    flat = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad and t.layout == torch.strided]
    wanted = [x for x in leaves if x.requires_grad]
    if not flat or not wanted:
        return [], None
    weights = [torch.arange(1, t.numel() + 1, dtype=torch.float32).cos().reshape(t.shape).to(t.dtype) for t in flat]
    try:
        return torch.autograd.grad(flat, wanted, weights, allow_unused=True), None
    except Exception as error:
        return None, error


def compare(actual: Any, expected: Any, what: str = "result") -> str | None:
    ours, our_spec = tree_flatten(actual)
    theirs, their_spec = tree_flatten(expected)
    if our_spec != their_spec:
        return f"{what}: structure {our_spec} instead of {their_spec}"
    for i, (a, b) in enumerate(zip(ours, theirs)):
        found = _compare_leaf(a, b)
        if found:
            return f"{what} {i}: {found}"
    return None


def _compare_leaf(a: Any, b: Any) -> str | None:
    if not isinstance(b, Tensor):
        same = type(a) is type(b) and (a == b or a is b or (a != a and b != b))
        return None if same else f"{a!r:.80} instead of {b!r:.80}"
    if not isinstance(a, Tensor):
        return f"{type(a)} instead of a tensor"
    facts = [(t.shape, t.dtype, t.device, t.layout, t.requires_grad) for t in (a, b)]
    if facts[0] != facts[1]:
        return f"{facts[0]} instead of {facts[1]}"
    if isinstance(a, ShardedBatch):
        shards = a.shards
        shapes = [s.shape[a.shard_dim] for s in shards]
        if sum(shapes) != a.shape[a.shard_dim]:
            return f"shards {shapes} of {a.shape}"
        try:
            torch.testing.assert_close(
                torch.cat([s.detach() for s in shards], a.shard_dim),
                plain(a.detach()),
                equal_nan=True,
                rtol=1e-6,
                atol=1e-6,
            )
        except AssertionError as e:
            return f"shards: {str(e)[:200]}"
    try:
        torch.testing.assert_close(plain(a.detach()), b.detach(), rtol=1e-4, atol=1e-5, equal_nan=True)
    except AssertionError as error:
        return f"values: {str(error)[:200]}"
    return None
