"""The split plan: rows of the batch per replica."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from everygpu import tree
from everygpu.devices.speed import measure_shares
from everygpu.errors import OptionError

Split = str | Sequence[float]
"""``"chunk"``, ``"even"``, or one weight per device."""


class Replicated:
    """Mark an input that every replica receives whole instead of a share of its rows.

    ::

        batch = {"x": x, "class_weights": everygpu.Replicated(torch.ones(3))}
        first, second = everygpu.parallel.scatter(batch, ["cpu", "cpu"])  # x is split, class_weights is whole in both

    Args:
        value: A tensor of any shape, or any nesting of containers with tensors in them.
        copies: One copy of ``value`` per replica, on its device, as the Feeder makes them; None to copy at each call.
    Source:
        ``torch.distributed.tensor.Replicate``, a placement of tensors, not of a call's arguments.
    """

    __slots__ = ("_copies", "value")

    def __init__(self, value: Any, *, copies: Sequence[Any] | None = None) -> None:
        self.value = value
        self._copies = copies

    def copies_on(self, devices: Sequence[torch.device], positions: Sequence[int]) -> list[Any] | None:
        """Return the copies at these positions; None unless each is on its device and of the current ``value``."""
        if self._copies is None or self._copies[0] is not self.value or max(positions) >= len(self._copies):
            return None
        found = [self._copies[position] for position in positions]
        leaves = ((leaf, d) for copy, d in zip(found, devices) for _, leaf in tree.leaves(copy, ""))
        return found if all(leaf.device == d for leaf, d in leaves if isinstance(leaf, Tensor)) else None

    def __repr__(self) -> str:
        return f"Replicated({self.value!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterSpec:
    """How batches are split, and over which devices."""

    devices: tuple[torch.device, ...]
    """One per replica."""
    dim: int
    split: Split


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Rows per replica, by position. Replicas without rows don't run."""

    rows: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows in the whole batch."""
        return sum(self.rows)

    @property
    def active(self) -> tuple[int, ...]:
        """Positions of the replicas that run: those with rows, or the first alone when the batch is empty."""
        return tuple(i for i, rows in enumerate(self.rows) if rows) or (0,)


def plan_split(num_rows: int, num_devices: int, split: Split = "chunk") -> SplitPlan:
    """Decide how many rows each device gets; see ``DataParallel``. ``"chunk"`` gives ``torch.chunk``'s sizes."""
    if isinstance(split, str) and split == "chunk":
        size = max(1, -(-num_rows // num_devices))
        shares = [max(0, min(size, num_rows - i * size)) for i in range(num_devices)]
    elif isinstance(split, str) and split == "even":
        base, extra = divmod(num_rows, num_devices)
        shares = [base + (i < extra) for i in range(num_devices)]
    else:
        shares = _weighted_shares(num_rows, _check_weights(split, num_devices, "'chunk', 'even'"))
    return SplitPlan(tuple(shares))


def check_split(split: Split, num_devices: int) -> None:
    """Validate ``split`` before the first batch, as ``plan_split`` would."""
    if not isinstance(split, str) or split not in ("chunk", "even"):
        _check_weights(split, num_devices, "'chunk', 'even', 'auto'")


def default_split() -> Split:
    """Return the ``split`` of scripts that pass none: that of ``everygpu run --split``, else ``"chunk"``."""
    return os.environ.get("EVERYGPU_SPLIT") or "chunk"


def resolve_split(split: Split, devices: Sequence[torch.device]) -> Split:
    """Resolve ``"auto"`` by measuring the devices: ``"even"`` for equal ones; return any other ``split`` unchanged."""
    if not isinstance(split, str) or split != "auto":
        check_split(split, len(devices))
        return split
    return (measure_shares(devices) if len(devices) > 1 else None) or "even"


def _check_weights(split: Any, num_devices: int, names: str) -> Sequence[float]:
    try:
        weights = [] if isinstance(split, str) else [float(w) for w in split]
    except (TypeError, ValueError):  # no sequence, or not of numbers
        weights = []
    finite = all(0 <= w < float("inf") for w in weights)
    if len(weights) != num_devices or not finite or weights[0] == 0:
        near = get_close_matches(split, re.findall(r"'(\w+)'", names), n=1) if isinstance(split, str) else []
        raise OptionError(
            f"split: must be {names} or one weight of 0 or more for each of the {num_devices} devices, the first above "
            f"0, as the first replica is the module itself; got {split!r}. "
            f"{f'Did you mean {near[0]!r}?' if near else 'Leave a device out by device_ids.'}"
        )
    return weights


def _weighted_shares(num_rows: int, weights: Sequence[float]) -> list[int]:
    """Round running totals, so that shares are whole, sum to the batch and stay within one row of exact.

    But the first device gets a row, where there is any: its replica is the module itself, with the buffers that stay.
    """
    total, seen, given, shares = sum(weights), 0.0, 0, []
    for weight in weights:
        seen += weight
        upto = max(round(num_rows * seen / total), min(1, num_rows))
        shares.append(upto - given)
        given = upto
    return shares
