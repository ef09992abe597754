"""What the kernels of a fused update work on: tables of addresses on each device, and the optimizer's states."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from everygpu.parallel.buckets.plan import BLOCK_NUMEL, BucketPlan
from everygpu.parallel.cuda_graphs.transfer.grad_tables import block_lengths
from everygpu.step.flat_parameters import FlatParameters
from everygpu.step.rules.rule import Options, UpdateRule
from everygpu.step.shards import Fragment, Shards, State
from everygpu.torch_private.tensors import foreach_add_


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRange:
    """Blocks of one dtype, side by side in tables that have the blocks of one chunk of each bucket in them."""

    first: int
    num_blocks: int
    dtype: torch.dtype


def block_ranges(plans: Sequence[BucketPlan]) -> list[BlockRange]:
    """Return where each bucket's blocks are in a device's tables: the same places on every device."""
    spans, first = [], 0
    for plan in plans:
        spans.append(BlockRange(first=first, num_blocks=plan.num_blocks, dtype=plan.dtype))
        first += spans[-1].num_blocks
    return spans


def join_ranges(spans: Sequence[BlockRange]) -> list[BlockRange]:
    """Put neighbours of one dtype together."""
    joined: list[BlockRange] = []
    for span in spans:
        if joined and joined[-1].dtype is span.dtype:
            span = replace(span, first=joined[-1].first, num_blocks=joined.pop().num_blocks + span.num_blocks)
        joined.append(span)
    return joined


@dataclass(slots=True, kw_only=True)
class DeviceTables:
    """What one device's kernels work on."""

    device: torch.device
    rule: UpdateRule
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
    """For each bucket, one chunk for each of the rule's states."""
    status: Tensor
    """Address of the numbers that say which devices' gradients aren't finite, shape (1,)."""
    unread_status: Tensor
    """Likewise of one that no device reads: of a sum it isn't known from which device a value came."""
    unread: Tensor
    """The memory that ``unread_status`` refers to."""
    one: Tensor
    options: Tensor
    """Shape (parameters, columns): rows of hyperparameters, as many as there are different ones."""
    written: set[int]
    """The fragments, by identity, whose place in the chunks has been written."""
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

    def adopt_states(self) -> None:
        """Bring states that the stock optimizer made, or that were loaded, to where the kernels find them."""
        for f, state in self.parts():
            for name, chunk in zip(self.rule.states, self.states[f.bucket]):
                kept = state.get(name)
                if kept is None and id(f) in self.written:
                    chunk.narrow(0, f.piece.start, f.piece.numel).zero_()
                elif kept is not None and kept.data_ptr() != chunk.data_ptr() + f.piece.start * chunk.element_size():
                    state[name] = chunk.narrow(0, f.piece.start, f.piece.numel).copy_(kept)
            if state:
                self.written.add(id(f))
            else:
                self.written.discard(id(f))

    def count_update(self, group_of: Mapping[int, Options]) -> None:
        """Keep the states as the stock optimizer would, once the kernels are queued.

        Args:
            group_of: The parameter groups of those parameters that are updated.
        """
        steps = []
        for f, state in self.parts():
            group = group_of.get(f.piece.index)
            if group is not None:
                if not state:
                    state.update(self._first_state(f, group))
                steps += [state["step"]] if "step" in state else []
        if steps:
            foreach_add_(steps, 1)

    def uncount(self, counted: set[int]) -> None:
        """Take an update of parameters back."""
        steps = [state["step"] for f, state in self.parts() if f.piece.index in counted and "step" in state]
        if steps:
            foreach_add_(steps, -1)

    def _first_state(self, f: Fragment, group: Options) -> State:
        if not self.rule.keeps_states(group):
            return {}
        views = [chunk.narrow(0, f.piece.start, f.piece.numel) for chunk in self.states[f.bucket]]
        states = dict(zip(self.rule.states, views))
        return {"step": self._first_step(group), **states} if self.rule.counts_steps else states

    def _first_step(self, group: Options) -> Tensor:
        on_device = group.get("capturable") or group.get("fused")
        # As torch's: a smaller dtype, which may be the default, would stop counting at 256.
        dtype = torch.float32 if group.get("fused") else torch.promote_types(torch.get_default_dtype(), torch.float32)
        return torch.zeros((), dtype=dtype, device=self.device if on_device else "cpu")


def make_tables(
    rule: UpdateRule,
    flat_params: FlatParameters,
    shards: Shards,
    spans: Sequence[BlockRange],
    rank: int,
    status: Tensor,
) -> DeviceTables:
    """Make the tables of one device.

    Args:
        rule: The optimizer's.
        flat_params: Parameters and gradients.
        shards: Their states.
        spans: Each bucket's blocks.
        rank: Which device.
        status: Begins with a number for each device, on the first one.
    """
    plans, device = flat_params.plans, flat_params.devices[rank]
    states = [[plan.make_chunk(device) for _ in rule.states] for plan in plans]
    begins = [rank * plan.chunk_numel for plan in plans]
    grads = _find_blocks(flat_params.grads, begins, spans, device)
    num_blocks = sum(span.num_blocks for span in spans)
    shape = max(1, len(flat_params.params)), len(rule.columns)
    unread = torch.zeros(1, dtype=torch.float32, device=device)
    return DeviceTables(
        device=device,
        rule=rule,
        fragments=shards.fragments[rank],
        optimizer=shards.optimizers[rank],
        values=_find_blocks(flat_params.values, begins, spans, device),
        grads=grads,
        own_grads=grads[rank : rank + 1].clone(),
        state_blocks=_find_blocks(states, [0] * len(begins), spans, device),
        lengths=torch.cat([block_lengths(plan, rank) for plan in plans]).to(device),
        squares=torch.zeros(num_blocks, dtype=torch.float32, device=device),
        states=states,
        status=torch.tensor([status.data_ptr()], dtype=torch.int64, device=device),
        unread_status=torch.tensor([unread.data_ptr()], dtype=torch.int64, device=device),
        unread=unread,
        one=torch.ones((), dtype=torch.float32, device=device),
        options=torch.zeros(shape, dtype=torch.float32, device=device),
        written=set(),
    )


def _find_blocks(
    buckets: Sequence[Sequence[Tensor]], begins: Sequence[int], spans: Sequence[BlockRange], device: torch.device
) -> Tensor:
    """Return where blocks are in memory, for kernels on a device; shape (tensors, blocks), int64.

    Args:
        buckets: For each bucket some flat tensors, equally many.
        begins: For each bucket the element at which the first block begins.
        spans: Each bucket's blocks.
        device: Where the kernels run.
    """
    rows = zip(*buckets)
    return torch.stack([torch.cat(list(map(_addresses, row, begins, spans))) for row in rows]).to(device)


def _addresses(flat: Tensor, begin: int, span: BlockRange) -> Tensor:
    """Return where the blocks of flat memory are, from one of its elements on; shape (blocks,), int64, on the CPU."""
    steps = torch.arange(span.num_blocks, dtype=torch.int64, device="cpu") * BLOCK_NUMEL
    return flat.data_ptr() + (begin + steps) * flat.element_size()
