"""torch's own databases of operators and modules: each call with plain tensors, and with batches in their place.

Importing the databases takes seconds and sets torch up for tests of its own, so it is done where they are used:
``python -m tests.parallel.sharded.databases NAME...`` says what differs for the operators of these names.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from everygpu.errors import EveryGPUError
from everygpu.parallel.sharded.batch import ShardedBatch
from tests.parallel.batches import lay_out, plain

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

DTYPES = (torch.float32, torch.int64, torch.bool)

UNCOMPARED = {
    "torch._scaled_mm": "float8, which assert_close compares by bits",
    "torch._scaled_mm_v2": "as torch._scaled_mm",
    "torch.ops.aten._flash_attention_forward": "for GPUs",
    "torch.ops.aten._efficient_attention_forward": "for GPUs",
    "nn.functional.batch_norm.without_cudnn": "for GPUs",
    **dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        "the values are anything",
    ),
}
"""Operators whose results can't be compared, each with the reason."""

DIFFERENT = {
    "matmul": ("out batch", "torch folds dimensions of `out` as a copy for a subclass, and copies that onto itself"),
    "svd_lowrank": ("complex", "rounding is magnified 1,000 times"),
    "pca_lowrank": ("complex", "rounding is magnified 1,000 times"),
}
"""Operators that differ from the plain ones, each with the kind of call and the reason."""


def cut(num_rows: int) -> list[int]:
    """Cut rows unevenly over two shards; the second one of a single row is empty."""
    second = num_rows // 3 or num_rows // 2
    return [num_rows - second, second]


def has_rows(x: Any) -> bool:
    is_strided = type(x) is Tensor and x.layout == torch.strided and not x.is_quantized
    return is_strided and x.ndim > 0 and x.device.type == "cpu"


def choices(call: Call) -> list[list[int]]:
    """Say which leaves of a call become batches: the first tensor, the second, all."""
    found = [i for i, leaf in enumerate(tree_leaves(call)) if has_rows(leaf)]
    return [c for i, c in enumerate((found[:1], found[1:2], found)) if c and (i < 2 or len(c) > 1)]


class Operands:
    """The operands of a call, fresh, and the leaves that their gradients go to."""

    def __init__(self, call: Call, places: list[int], dim: int) -> None:
        values, spec = tree_flatten(call)
        self.leaves: list[Tensor] = []
        self.call: Call = tree_unflatten([self._make(v, i in places, dim) for i, v in enumerate(values)], spec)

    def _make(self, value: Any, is_batch: bool, dim: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        leaf = value.detach().clone().requires_grad_(value.requires_grad)
        if not has_rows(value):
            return leaf
        self.leaves.append(leaf)
        x = leaf * 1 if leaf.requires_grad else leaf
        dim = min(dim, x.ndim - 1)
        return lay_out(x, cut(x.shape[dim]), dim) if is_batch else x


def attempt(function: Callable[..., Any], call: Call) -> tuple[Any, Exception | None]:
    first, args, kwargs = call
    torch.manual_seed(0)
    try:
        return function(first, *args, **kwargs), None
    except Exception as error:
        return None, error


def difference(function: Callable[..., Any], call: Call, places: list[int], dim: int, grads: bool) -> str | None:
    """Call a function with plain operands, and with some of them as batches; say what differs."""
    whole, mine = Operands(call, [], dim), Operands(call, places, dim)
    expected, refusal = attempt(function, whole.call)
    actual, error = attempt(function, mine.call)
    if refusal is not None or error is not None:
        return different_errors(error, refusal)
    found = compare(actual, expected, "result") or compare(mine.call, whole.call, "operand")
    if found or not grads:
        return found
    (theirs, refusal), (ours, error) = gradients(expected, whole.leaves), gradients(actual, mine.leaves)
    if refusal is not None or error is not None:
        return different_errors(error, refusal)
    return compare(ours, theirs, "gradient")


def different_errors(ours: Exception | None, theirs: Exception | None) -> str | None:
    """Compare types and messages, which name the class and the shape of a tensor; our own errors may come instead."""
    if isinstance(ours, EveryGPUError):
        return None
    words = [str(e).split("combination of arguments")[0].replace("t_() ", "t() ") for e in (ours, theirs)]
    words = [w.replace("ShardedBatch", "Tensor") for w in words]
    return None if (type(ours), words[0]) == (type(theirs), words[1]) else f"{ours!r} instead of {theirs!r}"


def gradients(result: Any, leaves: list[Tensor]) -> tuple[Any, Exception | None]:
    flat = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad and t.layout == torch.strided]
    wanted = [x for x in leaves if x.requires_grad]
    if not flat or not wanted:
        return [], None
    weights = [torch.arange(1, t.numel() + 1.0).cos().reshape(t.shape).to(t.dtype) for t in flat]
    try:
        return torch.autograd.grad(flat, wanted, weights, allow_unused=True), None
    except RuntimeError as error:
        return None, error


def compare(actual: Any, expected: Any, what: str) -> str | None:
    (ours, our_spec), (theirs, their_spec) = tree_flatten(actual), tree_flatten(expected)
    if our_spec != their_spec:
        return f"{what}: {our_spec} instead of {their_spec}"
    found = ((i, compare_leaf(a, b)) for i, (a, b) in enumerate(zip(ours, theirs)))
    return next((f"{what} {i}: {text}" for i, text in found if text), None)


def compare_leaf(a: Any, b: Any) -> str | None:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        is_same = type(a) is type(b) and (a is b or bool(a == b) or (a != a and b != b))
        return None if is_same else f"{a!r:.80} instead of {b!r:.80}"
    mine, theirs = ((t.shape, t.dtype, t.device, t.layout, t.requires_grad) for t in (a, b))
    if mine != theirs:
        return f"{mine} instead of {theirs}"
    try:
        if isinstance(a, ShardedBatch) and a.ndim:
            torch.testing.assert_close(
                torch.cat([s.detach() for s in a.shards], a.shard_dim), plain(a.detach()), equal_nan=True
            )
        torch.testing.assert_close(plain(a.detach()), b.detach(), rtol=1e-4, atol=1e-4, equal_nan=True)
    except (AssertionError, RuntimeError, IndexError) as error:
        return str(error)[:200]
    return None


# Operators.


@dataclass(frozen=True)
class Operator:
    """An entry of ``op_db`` and how it is tried."""

    info: Any
    most: int
    """Samples, spread over all there are."""
    dtypes: tuple[torch.dtype, ...] = field(default=DTYPES)

    @property
    def name(self) -> str:
        return f"{self.info.name}.{self.info.variant_test_name}".rstrip(".")

    @property
    def dtype(self) -> torch.dtype | None:
        return next((d for d in self.dtypes if d in self.info.supported_dtypes("cpu")), None)

    @property
    def family(self) -> str:
        return "complex" if self.dtype is not None and self.dtype.is_complex else "real"

    def samples(self) -> list[Any]:
        assert self.dtype is not None
        has_grad = self.info.supports_autograd and (self.dtype.is_floating_point or self.dtype.is_complex)
        found = list(self.info.sample_inputs("cpu", self.dtype, requires_grad=has_grad))
        return found[:: max(1, len(found) // self.most)][: self.most]

    def kinds(self, sample: Any) -> dict[str, Callable[..., Any]]:
        info = self.info
        kinds = {"function": info.op, "method": info.method_variant, "operator": info.operator_variant}
        if not sample.broadcasts_input:
            kinds |= {"in place": info.inplace_variant, "operator in place": info.inplace_operator_variant}
        if info.supports_out:
            kinds |= {"out": writing_to(info.op, as_batch=False), "out batch": writing_to(info.op, as_batch=True)}
        return {name: function for name, function in kinds.items() if function is not None}


def writing_to(function: Callable[..., Any], *, as_batch: bool) -> Callable[..., Any]:
    """Call a function with ``out=``, zeros of the result's shape; as batches where an operand is one."""

    def write(*args: Any, **kwargs: Any) -> Any:
        whole_args, whole_kwargs = tree_map_only(Tensor, lambda t: plain(t).detach(), (args, kwargs))
        expected = function(*whole_args, **whole_kwargs)
        is_batch = as_batch and any(isinstance(x, ShardedBatch) for x in tree_leaves((args, kwargs)))

        def zeros(t: Tensor) -> Tensor:
            zero = torch.zeros_like(t, memory_format=torch.contiguous_format) if has_rows(t) else torch.zeros_like(t)
            return lay_out(zero, cut(len(zero))) if is_batch and has_rows(zero) else zero

        out = zeros(expected) if isinstance(expected, Tensor) else tuple(map(zeros, expected))
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        return list(tree_leaves(function(*args, out=out, **kwargs))), list(tree_leaves(out))

    return write


def wrong_calls(operator: Operator) -> Iterator[str]:
    """Say which calls of an operator differ from those with plain tensors."""
    if operator.name in UNCOMPARED or operator.dtype is None:
        return
    different, _ = DIFFERENT.get(operator.info.name, (None, ""))
    for sample in operator.samples():
        call = (sample.input, tuple(sample.args), dict(sample.kwargs))
        for kind, function in operator.kinds(sample).items():
            for places in choices(call) if different not in (kind, operator.family) else ():
                for dim in (0, 1):
                    grads = kind == "function" and operator.info.supports_autograd
                    found = difference(function, call, places, dim, grads)
                    if found:
                        yield f"{operator.name} {kind}, leaves {places}, rows on {dim}: {found}"


def wrong_errors(operator: Operator) -> Iterator[str]:
    """Say which mistakes in an operator's call have another error than with plain tensors."""
    samples = [e.sample_input for e in operator.info.error_inputs("cpu")] if operator.info.error_inputs_func else []
    for sample in samples:
        call = (sample.input, tuple(sample.args), dict(sample.kwargs))
        if not any(isinstance(x, Tensor) and x.device.type != "cpu" for x in tree_leaves(call)):
            found = (difference(operator.info.op, call, places, 0, False) for places in choices(call))
            yield from (f"{operator.name} {places}: {text}" for places, text in zip(choices(call), found) if text)


def main(*wanted: str) -> None:
    """Say what differs for the operators of these names."""
    sys.modules["scipy"] = None  # type: ignore[assignment]  # half the time of the import, for references not used here
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    chosen = [entry for entry in op_db if entry.name in wanted]
    for entry in chosen:
        sys.stdout.writelines(f"{line}\n" for line in wrong_calls(Operator(entry, 1)))
    print(f"{len({entry.name for entry in chosen})} operators")


if __name__ == "__main__":
    main(*sys.argv[1:])
