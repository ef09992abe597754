"""An optimizer's options on their way to the kernels of a fused update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from everygpu.comm.streams import queueing_on
from everygpu.step.device_tables import BlockRange, DeviceTables
from everygpu.step.rules.rule import UpdateRule

Table = list[list[float]]


@dataclass(slots=True, kw_only=True)
class HyperparameterTable:
    """Which row of the options each block of parameters takes."""

    row_of: dict[int, int]
    """For each parameter that is updated."""
    blocks: list[Tensor]
    """For each device, one row per block of the device's chunks; -1 to leave it alone."""

    def follow(self, other: "HyperparameterTable") -> None:
        """Have recorded kernels, which read this one's memory, take the rows of now."""
        if self.row_of != other.row_of:
            self.row_of = other.row_of
            for mine, rows in zip(self.blocks, other.blocks):
                with queueing_on(mine.device):
                    mine.copy_(rows)


class Hyperparameters:
    """Sends rows of hyperparameters to the devices when they change.

    Args:
        optimizer: The stock one.
        rule: Its rule.
        params: The parameters that are updated.
        tables: Each device's.
        spans: Each bucket's blocks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rule: UpdateRule,
        params: Sequence[Tensor],
        tables: Sequence[DeviceTables],
        spans: Sequence[BlockRange],
    ) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._params = params
        self._tables = tables
        self._spans = spans
        self._num_blocks = sum(span.num_blocks for span in spans)
        self._sent: Table = []
        self._rows: dict[Any, Tensor] = {}
        # For each parameter its step, that tensor's version, and its value: reading it would wait for a GPU.
        self._known: dict[int, tuple[Tensor, int, int]] = {}

    def send(self, touched: set[int]) -> HyperparameterTable:
        """Put the optimizer's options of now on the devices.

        Args:
            touched: Parameters that have a gradient.
        Returns:
            Which of the options each block of parameters takes.
        """
        table, row_of = self._make_table(touched)
        if table and table != self._sent:
            self._copy(table)
        return HyperparameterTable(row_of=row_of, blocks=[self._rows_for(d, row_of) for d in self._tables])

    def count_update(self, touched: set[int]) -> None:
        """Take note that the steps of some parameters were increased by one."""
        for i in touched & self._known.keys():
            step, version, count = self._known[i]
            if step._version == version + 1:  # ours, and no other's
                self._known[i] = step, version + 1, count + 1

    def _copy(self, table: Table) -> None:
        rows = torch.tensor(table, dtype=torch.float32, device="cpu")  # a default device may be set
        rows = rows.pin_memory() if self._tables[0].device.type == "cuda" else rows
        for d in self._tables:
            with queueing_on(d.device):
                d.options[: len(table)].copy_(rows, non_blocking=True)
        self._sent = table

    def _make_table(self, touched: set[int]) -> tuple[Table, dict[int, int]]:
        """Return the rows of options, and which row each touched parameter has.

        Parameters of one group that have been updated equally often share a row.
        """
        groups = self._optimizer.param_groups
        group_of = {id(p): k for k, group in enumerate(groups) for p in group["params"]}
        counts = self._counts()
        keys = {i: (group_of[id(self._params[i])], counts.get(i, 0)) for i in sorted(touched)}
        numbers = {key: n for n, key in enumerate(dict.fromkeys(keys.values()))}
        rows = [self._rule.make_row(groups[group], count) for group, count in numbers]
        return rows, {i: numbers[key] for i, key in keys.items()}

    def _counts(self) -> dict[int, int]:
        """Return how often each parameter has been updated; 1 if it has a state, where no steps are counted."""
        states = {f.piece.index: state for d in self._tables for f, state in d.parts() if state}
        names = self._rule.states
        return {
            i: self._count_of(i, s["step"]) if "step" in s else int(any(s.get(name) is not None for name in names))
            for i, s in states.items()
        }

    def _count_of(self, index: int, step: Tensor) -> int:
        known = self._known.get(index)
        if known is None or known[0] is not step or known[1] != step._version:
            known = self._known[index] = step, step._version, int(step)
        return known[2]

    def _rows_for(self, d: DeviceTables, row_of: Mapping[int, int]) -> Tensor:
        """Return the row of each block of a device's chunks."""
        key = (d.device, id(d), tuple(row_of.items()))
        if key not in self._rows:
            if len(self._rows) >= 4 * len(self._tables):
                self._rows.clear()
            rows = torch.full((self._num_blocks,), -1, dtype=torch.int32, device="cpu")
            for f in d.fragments:
                first, blocks = self._spans[f.bucket].first, f.piece.blocks
                rows[first + blocks.start : first + blocks.stop] = row_of.get(f.piece.index, -1)
            self._rows[key] = rows.to(d.device)
        return self._rows[key]
