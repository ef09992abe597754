"""An update by one kernel per device, in place of adding up, stepping and handing out one after another."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from everygpu import comm
from everygpu.comm.streams import synchronize_streams
from everygpu.devices.p2p import reach_each_other
from everygpu.parallel.buckets.plan import BLOCK_NUMEL, BlockRange, block_lengths, block_ranges, join_ranges
from everygpu.parallel.engines.thread_state import queueing_on
from everygpu.step.flat_parameters import FlatParameters
from everygpu.step.shards import Fragment, Shards, State
from everygpu.torch_private.tensors import foreach_add_

Options = Mapping[str, Any]
"""A parameter group of the stock optimizer."""

STATES: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
}
"""What each kernel keeps for every element."""

DTYPES = (torch.float32, torch.bfloat16)
"""Of parameters that there are kernels for; their gradients and states have the same."""


def can_fuse(optimizer: Optimizer, flat_params: FlatParameters) -> bool:
    """Tell whether there is a kernel for an optimizer, and devices that reach each other's memory."""
    return (
        len(set(flat_params.devices)) == len(flat_params.devices)
        and reach_each_other(flat_params.devices)
        and has_kernel(optimizer, flat_params)
        and comm.has_triton()
    )


def has_kernel(optimizer: Optimizer, flat_params: FlatParameters) -> bool:
    """Tell whether the kernels do what an optimizer does, for parameters as these."""
    whole_blocks = all(slot.start % BLOCK_NUMEL == 0 for plan in flat_params.plans for slot in plan.slots)
    known = bool(flat_params.plans) and all(plan.dtype in DTYPES for plan in flat_params.plans)
    return type(optimizer) in STATES and has_plain_options(optimizer) and whole_blocks and known


def has_plain_options(optimizer: Optimizer) -> bool:
    """Tell whether the kernels heed all options that an optimizer has now; schedulers and loading may change them."""
    groups = optimizer.param_groups
    tensors = [v for group in groups for v in (group["lr"], *group.get("betas", ())) if isinstance(v, Tensor)]
    return not tensors and not any(group.get("amsgrad") for group in groups)


def keeps_states(shards: Shards) -> bool:
    """Tell whether the kernels, which keep states in the parameters' dtypes, keep all that torch would.

    After ``model.bfloat16()``, torch's SGD goes on with a momentum in float32; its Adam fails.
    """
    return all(
        torch.promote_types(state[name].dtype, f.param.dtype) is f.param.dtype
        for fragments, optimizer in zip(shards.fragments, shards.optimizers)
        if isinstance(optimizer, torch.optim.SGD)
        for f in fragments
        if (state := optimizer.state.get(f.param))
        for name in STATES[type(optimizer)]
        if state.get(name) is not None
    )


@dataclass(slots=True, kw_only=True)
class _Device:
    """What one device's kernels work on."""

    device: torch.device
    fragments: list[Fragment]
    optimizer: Optimizer | None
    values: Tensor
    """Addresses of all devices' parameters for each block of this one's chunks, bucket after bucket; shape (devices,
    blocks). The other tables have the same columns."""
    grads: Tensor
    """Of all devices' gradients, shape (devices, blocks)."""
    own_grads: Tensor
    """Of this device's, shape (1, blocks)."""
    state_blocks: Tensor
    """Of the states, shape (names, blocks)."""
    lengths: Tensor
    """How many elements of a parameter are in each block."""
    squares: Tensor
    """The sum of the squares of each block's gradients, where these are added up first."""
    states: list[list[Tensor]]
    """For each bucket, one chunk for each name in ``STATES``."""
    addresses: list[list[int]]
    """Of the states' chunks: asking each would take longer than comparing."""
    one: Tensor
    options: Tensor
    """Shape (parameters, columns): rows of options, as many as there are different ones."""

    found: tuple[list[State], list[tuple[Fragment, State]]] | None = None
    """All states that there were when ``parts`` looked last, and what it found."""

    def parts(self) -> list[tuple[Fragment, State]]:
        """Pair what this device updates with the state it has: looked up when the optimizer has others, or more."""
        if self.optimizer is None:
            return []
        table = self.optimizer.state
        if self.found is not None:
            before, pairs = self.found
            if len(before) == len(table) and all(map(operator.is_, table.values(), before)):
                return pairs
        pairs = [(f, table[f.param]) for f in self.fragments]
        self.found = list(table.values()), pairs
        return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperparameterTable:
    """Which row of the options each block of parameters takes."""

    row_of: dict[int, int]
    """For each parameter that is updated."""
    blocks: list[Tensor]
    """For each device, one row per block of the device's chunks; -1 to leave it alone."""


class FusedUpdate:
    """Runs the kernels for one arena.

    The state stays in the stock optimizers of the shards, as views of the chunks that the kernels work on.

    Args:
        optimizer: The stock one.
        arena: Parameters and gradients.
        shards: The state.
    """

    def __init__(self, optimizer: Optimizer, flat_params: FlatParameters, shards: Shards) -> None:
        self._optimizer = optimizer
        self._names = STATES[type(optimizer)]
        self._make_row = _sgd_row if isinstance(optimizer, torch.optim.SGD) else _adam_row
        self._sent: list[list[float]] = []
        self._flat_params = flat_params
        # For each bucket its blocks, and all blocks in as few spans as there can be.
        self.spans = block_ranges(flat_params.plans)
        self.whole = join_ranges(self.spans)
        self.num_blocks = sum(span.num_blocks for span in self.spans)
        comm.connect(flat_params.devices)
        self._devices = [self._lay_out(shards, j) for j in range(len(flat_params.devices))]
        self._rows: dict[Any, Tensor] = {}
        # The fragments, by identity, whose place in the chunks has been written.
        self._written: set[int] = set()
        # For each parameter its step, that tensor's version, and its value: reading it would wait for a GPU.
        self._known: dict[int, tuple[Tensor, int, int]] = {}

    def run(self, touched: set[int], *, factor: float, is_reduced: bool) -> None:
        """Update every touched parameter once, on all devices.

        Args:
            touched: Parameters that have a gradient.
            factor: What the gradients are multiplied by.
            is_reduced: Each device's own chunk of the gradients is the sum of all already.
        """
        self.launch(self.prepare(touched), factor=factor, is_reduced=is_reduced)
        self.finish(touched)

    def prepare(self, touched: set[int]) -> HyperparameterTable:
        """Put the optimizer's options of now on the devices, where the kernels look for them.

        Args:
            touched: Parameters that have a gradient.
        Returns:
            Which of the options each block of parameters takes.
        """
        self._adopt_states()
        table, row_of = self._make_table(touched)
        if table and table != self._sent:
            self._send(table)
        return HyperparameterTable(row_of=row_of, blocks=[self._rows_for(d, row_of) for d in self._devices])

    def launch(self, rows: HyperparameterTable, *, factor: float, is_reduced: bool) -> None:
        """Queue the kernels; this alone may be part of a CUDA graph. See ``run``."""
        synchronize_streams(self._flat_params.devices)
        for rank, d in enumerate(self._devices):
            with queueing_on(d.device):
                scale = None if factor == 1 else torch.full((), factor, dtype=torch.float32, device=d.device)
                for span in self.whole:
                    self.launch_range(span, rank, rows, factor=scale, is_reduced=is_reduced)
        synchronize_streams(self._flat_params.devices)

    def reduce_range(self, span: BlockRange, rank: int, rows: HyperparameterTable, grads: Tensor) -> None:
        """Queue the addition of one device's blocks to where ``is_reduced`` has it looked for; see ``launch_range``."""
        from everygpu.step import kernels  # needs Triton, which not every machine has

        d = self._devices[rank]
        kernels.run_reduce(grads, d.own_grads, d.squares, rows.blocks[rank], d.lengths, span=span, rank=rank)

    def norm_of_reduced(self, rows: HyperparameterTable) -> Tensor:
        """Return the norm of what ``reduce_range`` has added up, as one vector; shape (), on the first device.

        All devices must have met since.

        Args:
            rows: With which it was; other blocks have squares of earlier gradients.
        """
        home = self._devices[0].device
        squares = [d.squares.masked_fill(table < 0, 0.0).sum() for d, table in zip(self._devices, rows.blocks)]
        return torch.stack([comm.copy(s, home) for s in squares]).sum().sqrt()

    def launch_range(
        self,
        span: BlockRange,
        rank: int,
        rows: HyperparameterTable,
        *,
        is_reduced: bool,
        factor: Tensor | None = None,
        grads: Tensor | None = None,
    ) -> None:
        """Queue the update of some of one device's blocks on its current stream.

        All devices' gradients must be there, and all devices be done with the parameters.

        Args:
            span: One of ``spans``, or several together.
            factor: What the gradients are multiplied by, if by anything; shape (), on the device.
            grads: Where the gradients are, if not in the arena: all devices' addresses for each block.
        """
        from everygpu.step import kernels  # needs Triton, which not every machine has

        run = kernels.run_sgd if isinstance(self._optimizer, torch.optim.SGD) else kernels.run_adam
        d = self._devices[rank]
        if grads is None:
            grads = d.own_grads if is_reduced else d.grads
        tables = (rows.blocks[rank], d.lengths, d.options)
        run(grads, d.values, d.state_blocks, *tables, factor=d.one if factor is None else factor, span=span, rank=rank)

    def _send(self, table: list[list[float]]) -> None:
        rows = torch.tensor(table, dtype=torch.float32, device="cpu")  # a default device may be set
        rows = rows.pin_memory() if self._flat_params.devices[0].type == "cuda" else rows
        for d in self._devices:
            with queueing_on(d.device):
                d.options[: len(table)].copy_(rows, non_blocking=True)
        self._sent = table

    def _lay_out(self, shards: Shards, rank: int) -> _Device:
        flat_params, device = self._flat_params, self._flat_params.devices[rank]
        states = [
            [torch.zeros(plan.chunk_numel, dtype=plan.dtype, device=device) for _ in self._names]
            for plan in flat_params.plans
        ]
        begins = [rank * plan.chunk_numel for plan in flat_params.plans]
        grads = self._find_blocks(flat_params.grads, begins, device)
        return _Device(
            device=device,
            fragments=shards.fragments[rank],
            optimizer=shards.optimizers[rank],
            values=self._find_blocks(flat_params.values, begins, device),
            grads=grads,
            own_grads=grads[rank : rank + 1].clone(),
            state_blocks=self._find_blocks(states, [0] * len(begins), device),
            lengths=torch.cat([block_lengths(plan, rank) for plan in flat_params.plans]).to(device),
            squares=torch.zeros(self.num_blocks, dtype=torch.float32, device=device),
            states=states,
            addresses=[[chunk.data_ptr() for chunk in chunks] for chunks in states],
            one=torch.ones((), dtype=torch.float32, device=device),
            options=torch.zeros(
                max(1, len(flat_params.params)), self._num_columns(), dtype=torch.float32, device=device
            ),
        )

    def _find_blocks(self, buckets: Sequence[Sequence[Tensor]], begins: Sequence[int], device: torch.device) -> Tensor:
        """Return where blocks are in memory, for kernels on a device; shape (tensors, blocks), int64.

        Args:
            buckets: For each bucket some flat tensors, equally many.
            begins: For each bucket the element at which the first block begins.
        """
        rows = zip(*buckets)
        return torch.stack([torch.cat(list(map(_addresses, row, begins, self.spans))) for row in rows]).to(device)

    def _adopt_states(self) -> None:
        """Bring states that the stock optimizers made, or that were loaded, to where the kernels find them."""
        for d in self._devices:
            for f, state in d.parts():
                for name, chunk, begin in zip(self._names, d.states[f.bucket], d.addresses[f.bucket]):
                    kept = state.get(name)
                    if kept is None and id(f) in self._written:
                        chunk.narrow(0, f.piece.start, f.piece.numel).zero_()
                    elif kept is not None and kept.data_ptr() != begin + f.piece.start * chunk.element_size():
                        state[name] = chunk.narrow(0, f.piece.start, f.piece.numel).copy_(kept)
                if state:
                    self._written.add(id(f))
                else:
                    self._written.discard(id(f))

    def _make_table(self, touched: set[int]) -> tuple[list[list[float]], dict[int, int]]:
        """Return the rows of options, and which row each touched parameter has.

        Parameters of one group that have been updated equally often share a row.
        """
        groups = self._optimizer.param_groups
        group_of = {id(p): k for k, group in enumerate(groups) for p in group["params"]}
        counts = self._counts()
        keys = {i: (group_of[id(self._flat_params.params[i])], counts.get(i, 0)) for i in sorted(touched)}
        numbers = {key: n for n, key in enumerate(dict.fromkeys(keys.values()))}
        decoupled = isinstance(self._optimizer, torch.optim.AdamW)
        rows = [self._make_row(groups[group], count, decoupled) for group, count in numbers]
        return rows, {i: numbers[key] for i, key in keys.items()}

    def _num_columns(self) -> int:
        return len(self._make_row(self._optimizer.param_groups[0], 0, False))

    def _counts(self) -> dict[int, int]:
        """Return how often each parameter has been updated; for SGD, 1 if it has a momentum."""
        states = {f.piece.index: state for d in self._devices for f, state in d.parts() if state}
        return {
            i: self._count_of(i, s["step"]) if "step" in s else int(s.get("momentum_buffer") is not None)
            for i, s in states.items()
        }

    def _count_of(self, index: int, step: Tensor) -> int:
        known = self._known.get(index)
        if known is None or known[0] is not step or known[1] != step._version:
            known = self._known[index] = step, step._version, int(step)
        return known[2]

    def _rows_for(self, d: _Device, row_of: Mapping[int, int]) -> Tensor:
        """Return the row of each block of this device's chunks."""
        key = (d.device, id(d), tuple(row_of.items()))
        if key not in self._rows:
            if len(self._rows) >= 4 * len(self._devices):
                self._rows.clear()
            rows = torch.full((self.num_blocks,), -1, dtype=torch.int32, device="cpu")
            for f in d.fragments:
                first, blocks = self.spans[f.bucket].first, f.piece.blocks
                rows[first + blocks.start : first + blocks.stop] = row_of.get(f.piece.index, -1)
            self._rows[key] = rows.to(d.device)
        return self._rows[key]

    def finish(self, touched: set[int]) -> None:
        """Keep the states as the stock optimizers would, once the kernels are queued."""
        options = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for d in self._devices:
            steps = []
            for f, state in d.parts():
                if f.piece.index in touched:
                    group = options[id(self._flat_params.params[f.piece.index])]
                    if not state:
                        state.update(self._first_state(d, f, group))
                    steps += [state["step"]] if "step" in state else []
            if steps:
                foreach_add_(steps, 1)
        for i in touched & self._known.keys():
            step, version, count = self._known[i]
            if step._version == version + 1:  # ours, and no other's
                self._known[i] = step, version + 1, count + 1

    def _first_state(self, d: _Device, f: Fragment, group: Options) -> State:
        views = [chunk.narrow(0, f.piece.start, f.piece.numel) for chunk in d.states[f.bucket]]
        if isinstance(self._optimizer, torch.optim.SGD):
            return {"momentum_buffer": views[0]} if group["momentum"] else {}
        on_device = group.get("capturable") or group.get("fused")
        # As torch's: a smaller dtype, which may be the default, would stop counting at 256.
        dtype = torch.float32 if group.get("fused") else torch.promote_types(torch.get_default_dtype(), torch.float32)
        step = torch.zeros((), dtype=dtype, device=d.device if on_device else "cpu")
        return {"step": step, **dict(zip(self._names, views))}


def _adam_row(group: Options, count: int, decoupled: bool) -> list[float]:
    """Work out, in double precision, what one update needs; in the order of ``kernels.ADAM_COLUMNS``."""
    beta1, beta2 = group["betas"]
    decay = group["weight_decay"]
    decoupled = bool(group.get("decoupled_weight_decay", decoupled))
    return [
        -1.0 if group["maximize"] else 1.0,
        1 - group["lr"] * decay if decoupled else 1.0,
        0.0 if decoupled else decay,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        group["eps"],
        group["lr"] / (1 - beta1 ** (count + 1)),
        1 / math.sqrt(1 - beta2 ** (count + 1)),
    ]


def _sgd_row(group: Options, count: int, decoupled: bool) -> list[float]:
    """In the order of ``kernels.SGD_COLUMNS``; the first momentum is the gradient, undampened."""
    return [
        -1.0 if group["maximize"] else 1.0,
        group["weight_decay"],
        group["momentum"],
        1 - group["dampening"] if count else 1.0,
        float(group["nesterov"]),
        group["lr"],
    ]


def _addresses(flat: Tensor, begin: int, span: BlockRange) -> Tensor:
    """Return where the blocks of flat memory are, from one of its elements on; shape (blocks,), int64, on the CPU."""
    steps = torch.arange(span.num_blocks, dtype=torch.int64, device="cpu") * BLOCK_NUMEL
    return flat.data_ptr() + (begin + steps) * flat.element_size()
