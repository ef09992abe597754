"""A running mean for training loops."""

import math
from numbers import Real
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor

from everygpu.errors import OptionError
from everygpu.ranks.group import init_group


class Meter:
    """Average a loss or metric over the rows seen, without keeping a graph or waiting for a device.

    ``update`` queues one small addition on the value's device. Reading ``avg`` or printing waits for the devices::

        meter = everygpu.Meter()
        for x, y in loader:
            meter.update(criterion(model(x), y), len(x))
        print(f"loss {meter:.3f}")

    The value is a number, or a tensor of shape () or (replicas,).
    """

    __slots__ = ("_num_rows", "_number", "_sums")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._sums: dict[torch.device, Tensor] = {}
        self._number = 0.0
        self._num_rows = 0

    def update(self, value: float | Tensor, num_rows: int = 1) -> None:
        """Add a mean over rows.

        Args:
            value: A real number; a tensor of shape () on any device; or one of shape (replicas,), whose mean counts.
            num_rows: How many rows it is the mean of; with 0 the value is not looked at.
        Raises:
            OptionError: the value has another shape or is no real number, or num_rows is no whole number from 0.
        """
        # A tensor would make index() wait for its device.
        if isinstance(num_rows, Tensor) or not isinstance(num_rows, SupportsIndex) or index(num_rows) < 0:
            got = type(num_rows).__qualname__ if isinstance(num_rows, Tensor) else repr(num_rows)
            raise OptionError(f"Meter: num_rows is no whole number from 0 but {got}. Pass the batch's length, len(x).")
        rows = index(num_rows)
        if isinstance(value, Tensor):
            if value.ndim > 1 or value.numel() == 0 or value.is_complex():
                got = (
                    f"the value has dtype {value.dtype} and shape {tuple(value.shape)}, and must be real with shape ()"
                )
                raise OptionError(f"Meter: {got} or (replicas,). Average it over the rows first.")
            if rows:
                self._add(value, rows)
        elif isinstance(value, Real):
            self._number += float(value) * rows if rows else 0.0
        else:
            raise OptionError(f"Meter: a {type(value).__qualname__} is no number or tensor. Pass the loss itself.")
        self._num_rows += rows

    def sync(self) -> "Meter":
        """Return another meter with what all ranks have seen; every rank calls it, at the end of an evaluation::

            total = meter.sync()
            if everygpu.is_main():
                print(f"accuracy {total:.3f} of {total.num_rows} rows")

        Raises:
            RankError: the environment is incomplete.
        """
        group, total = init_group(), Meter()
        total._number, total._num_rows = self._total(), self._num_rows
        if group is not None:
            numbers, counts = zip(*group.gather((total._number, self._num_rows)))
            total._number, total._num_rows = sum(numbers), sum(counts)
        return total

    @property
    def num_rows(self) -> int:
        """Rows seen since the last reset."""
        return self._num_rows

    @property
    def avg(self) -> float:
        """The mean over all rows, nan before the first; reading it waits for the devices."""
        return self._total() / self._num_rows if self._num_rows else math.nan

    def _total(self) -> float:
        return self._number + sum(total.item() for total in self._sums.values())

    def _add(self, value: Tensor, rows: int) -> None:
        dtype = torch.float32 if value.device.type == "mps" else torch.float64
        # Not in place: a sum that began in inference mode may not be changed outside of it.
        with torch.no_grad():
            total = value.detach().to(dtype).mean() * rows
            known = self._sums.get(value.device)
            self._sums[value.device] = total if known is None else known + total

    def __float__(self) -> float:
        return self.avg

    def __format__(self, spec: str) -> str:
        return format(self.avg, spec) if spec else str(self)

    def __str__(self) -> str:
        return f"{self.avg:.4g}"

    def __repr__(self) -> str:
        return f"Meter(avg={self.avg!r}, num_rows={self._num_rows})"
