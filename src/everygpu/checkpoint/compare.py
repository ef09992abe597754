"""Compare two models' states, name by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from everygpu.keys import align_keys
from everygpu.tree import map_leaves

Kind: TypeAlias = Literal["only in A", "only in B", "shape", "dtype", "value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one entry differs."""

    name: str
    """As A has it, where A has it."""
    kind: Kind
    detail: str = ""
    max_abs: float | None = None
    """The largest absolute difference of two values; inf where one alone is nan."""
    max_rel: float | None = None
    """The largest difference relative to the larger of the two values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two states have in common, and what not."""

    num_equal: int
    """Entries equal bit by bit, or in every value."""
    num_close: int
    """Entries that differ within the tolerance."""
    differences: tuple[Difference, ...]


def compare(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    advance: Callable[[int], None] = lambda num_entries: None,
) -> Comparison:
    """Compare two states; names may differ by wrappers' segments such as ``module``.

    Args:
        a: Names and tensors on the CPU.
        b: Likewise.
        rtol: As ``torch.isclose`` has it, relative to B.
        atol: Likewise, absolute. Both 0: values must be equal; nan equals nan.
        advance: Called with 1 after each entry.
    """
    b = align_keys(b, a.keys())
    num_equal = num_close = 0
    differences = []
    for name in [*a, *(name for name in b if name not in a)]:
        found = _compare_entry(name, a, b, rtol, atol)
        if found is None:
            num_equal += 1
        elif found == "close":
            num_close += 1
        else:
            differences.append(found)
        advance(1)
    return Comparison(num_equal=num_equal, num_close=num_close, differences=tuple(differences))


def _compare_entry(
    name: str, a: Mapping[str, Any], b: Mapping[str, Any], rtol: float, atol: float
) -> Difference | Literal["close"] | None:
    if name not in b:
        return Difference(name=name, kind="only in A", detail=_describe(a[name]))
    if name not in a:
        return Difference(name=name, kind="only in B", detail=_describe(b[name]))
    x, y = a[name], b[name]
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return None if _same_value(x, y) else Difference(name=name, kind="value", detail="extra state")
    if x.shape != y.shape:
        return Difference(name=name, kind="shape", detail=f"{tuple(x.shape)} and {tuple(y.shape)}")
    if x.dtype != y.dtype:
        return Difference(name=name, kind="dtype", detail=f"{_short(x.dtype)} and {_short(y.dtype)}")
    return _compare_values(name, _plain(x), _plain(y), rtol, atol)


def _compare_values(name: str, x: Tensor, y: Tensor, rtol: float, atol: float) -> Difference | Literal["close"] | None:
    if _same_bits(x, y):
        return None
    wide = torch.complex128 if x.is_complex() else torch.float64
    u, v = x.to(wide), y.to(wide)
    both_nan = u.isnan() & v.isnan()
    is_exact = not (x.is_floating_point() or x.is_complex())  # float64 would blur large whole numbers
    if not is_exact and bool(((u == v) | both_nan).all()):
        return None
    if (rtol or atol) and torch.allclose(u, v, rtol=rtol, atol=atol, equal_nan=True):
        return "close"
    gap = torch.where((u == v) | both_nan, 0.0, (u - v).abs()).nan_to_num(nan=torch.inf)
    largest = torch.maximum(u.abs(), v.abs())
    relative = torch.where(gap == 0, 0.0, gap / largest).nan_to_num(nan=torch.inf)
    return Difference(name=name, kind="value", max_abs=gap.max().item(), max_rel=relative.max().item())


def _same_value(x: Any, y: Any) -> bool:
    """Compare what modules give as extra state: printed, tensors lack digits, and large ones their middle."""
    skeletons, tensors = zip(*(_take_apart(value) for value in (x, y)))
    if repr(skeletons[0]) != repr(skeletons[1]) or len(tensors[0]) != len(tensors[1]):
        return False
    return all(_compare_entry("", {"": u}, {"": v}, 0.0, 0.0) is None for u, v in zip(*tensors))


def _take_apart(value: Any) -> tuple[Any, list[Tensor]]:
    found: list[Tensor] = []

    def put_aside(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append(leaf)
            return "a tensor"
        is_array = hasattr(leaf, "dtype") and hasattr(leaf, "tolist")
        return (str(leaf.dtype), leaf.shape, leaf.tolist()) if is_array else leaf

    return map_leaves(put_aside, value), found


def _same_bits(x: Tensor, y: Tensor) -> bool:
    if x.numel() == 0:
        return True
    flat = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (x, y))
    return torch.equal(*flat)


def _plain(tensor: Tensor) -> Tensor:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor.detach().to_dense().resolve_conj().resolve_neg()


def _describe(value: Any) -> str:
    return f"{_short(value.dtype)} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
