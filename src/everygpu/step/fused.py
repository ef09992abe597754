"""An update by one kernel per device, in place of a reduce-scatter, a step and an all-gather."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from everygpu import comm
from everygpu.comm.streams import queueing_on, synchronize_streams
from everygpu.devices.p2p import reach_each_other
from everygpu.parallel.buckets.plan import BLOCK_NUMEL
from everygpu.step.device_tables import BlockRange, block_ranges, join_ranges, make_tables
from everygpu.step.flat_parameters import FlatParameters
from everygpu.step.hyperparameters import Hyperparameters, HyperparameterTable
from everygpu.step.rules.rule import UpdateRule
from everygpu.step.rules.table import find_rule
from everygpu.step.shards import Shards
from everygpu.step.update import clip_factor

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
    return has_plain_options(optimizer) and whole_blocks and known


def has_plain_options(optimizer: Optimizer) -> bool:
    """Tell whether the kernels heed all options that an optimizer has now; schedulers and loading may change them."""
    rule = find_rule(optimizer)
    return rule is not None and all(map(rule.is_plain, optimizer.param_groups))


def keeps_states(shards: Shards, rule: UpdateRule) -> bool:
    """Tell whether the kernels, which keep states in the parameters' dtypes, keep all that torch would.

    After ``model.bfloat16()``, torch's SGD goes on with a momentum in float32; its Adam fails.
    """
    return not rule.widens_states or all(
        torch.promote_types(state[name].dtype, f.param.dtype) is f.param.dtype
        for fragments, optimizer in zip(shards.fragments, shards.optimizers)
        if optimizer is not None
        for f in fragments
        if (state := optimizer.state.get(f.param))
        for name in rule.states
        if state.get(name) is not None
    )


def make_fused(optimizer: Optimizer, flat_params: FlatParameters, shards: Shards) -> "FusedUpdate | None":
    """Make the fused update of parameters; None where no kernel does what the optimizer does."""
    rule = find_rule(optimizer)
    if rule is None or not can_fuse(optimizer, flat_params) or not keeps_states(shards, rule):
        return None
    return FusedUpdate(optimizer, rule, flat_params, shards)


class FusedUpdate:
    """Runs an optimizer's kernel on flat parameters.

    The state stays in the stock optimizers of the shards, as views of the chunks that the kernels work on.

    Args:
        optimizer: The stock one.
        rule: Its rule.
        flat_params: Parameters and gradients.
        shards: The state.
    """

    def __init__(self, optimizer: Optimizer, rule: UpdateRule, flat_params: FlatParameters, shards: Shards) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._flat_params = flat_params
        # For each bucket its blocks, and all blocks in as few ranges as there can be.
        self.spans = block_ranges(flat_params.plans)
        self.whole = join_ranges(self.spans)
        comm.connect(flat_params.devices)
        ranks = range(len(flat_params.devices))
        self.status = torch.zeros(len(flat_params.devices) + 1, dtype=torch.float32, device=flat_params.devices[0])
        """Of the last update; see ``FiniteCheck``."""
        self._tables = [make_tables(rule, flat_params, shards, self.spans, rank, self.status) for rank in ranks]
        self._hyperparameters = Hyperparameters(optimizer, rule, flat_params.params, self._tables, self.spans)

    def begin(self, loss: Tensor) -> None:
        """Begin a status, before any kernel of an update: it is left out where a loss, of shape (), isn't finite."""
        self.status[:-1].zero_()
        torch.add(self._tables[0].one, comm.copy(loss, self.status.device), alpha=0, out=self.status[-1])

    @property
    def gate(self) -> Tensor:
        """What the factor is multiplied by: 1, or nan where the update is left out; on the first device."""
        return self.status[-1]

    def run(self, touched: set[int], *, factor: float | Tensor, losses: Tensor | None) -> Tensor | None:
        """Add the gradients up, and update every touched parameter once, on all devices.

        Args:
            touched: Parameters that have a gradient.
            factor: What the gradients are multiplied by; a tensor has shape () and is on the first device.
            losses: The sum of the losses, shape (): nothing is updated where that or a gradient isn't finite.
        Returns:
            The gradient's norm, shape (); None without losses, where nothing has to wait for it.
        """
        rows, norm = self.prepare(touched), None
        if losses is None:
            self.launch(rows, factor=factor, is_reduced=False)
        else:
            self.begin(losses)
            synchronize_streams(self._flat_params.devices)
            for rank, d in enumerate(self._tables):
                with queueing_on(d.device):
                    for span in self.whole:
                        self.reduce_range(span, rank, rows, d.grads)
            norm = self.update_from_sums(rows, factor=factor, is_checked=True)
        self.finish(touched)
        return norm

    def run_on_sums(self, touched: set[int], *, factor: float | Tensor) -> None:
        """Update every touched parameter, where each device's own chunk of the gradients is the sum of all already.

        Args:
            touched: Parameters that have a gradient.
            factor: What the gradients are multiplied by; all is left alone where that isn't finite.
        """
        self.launch(self.prepare(touched), factor=factor, is_reduced=True)
        self.finish(touched)

    def update_from_sums(
        self,
        rows: HyperparameterTable,
        *,
        factor: float | Tensor = 1.0,
        clip_norm: float | None = None,
        is_checked: bool,
    ) -> Tensor:
        """Queue the update from what ``reduce_range`` has added up on all devices; this may be part of a CUDA graph.

        Args:
            rows: With which it was: other blocks have squares of earlier gradients.
            factor: What the gradients are multiplied by.
            clip_norm: The largest norm that they may have then; longer ones are scaled down.
            is_checked: Leave the update out where the norm isn't finite, or the loss that it was begun with.
        Returns:
            The norm before that, shape (), on the first device.
        """
        synchronize_streams(self._flat_params.devices)
        squares = [d.squares.masked_fill(table < 0, 0.0).sum() for d, table in zip(self._tables, rows.blocks)]
        norm = torch.stack([comm.copy(s, self.status.device) for s in squares]).sum().sqrt()
        if isinstance(factor, Tensor) or factor != 1:
            norm = norm * factor
        if clip_norm is not None:
            factor = factor * clip_factor(norm, clip_norm)
        if is_checked:
            self.status[-1].add_(norm, alpha=0)
            factor = factor * self.gate
        self.launch(rows, factor=factor, is_reduced=True)
        return norm

    def prepare(self, touched: set[int]) -> HyperparameterTable:
        """Put the optimizer's options and states of now on the devices, where the kernels look for them.

        Args:
            touched: Parameters that have a gradient.
        Returns:
            Which of the options each block of parameters takes.
        """
        for d in self._tables:
            d.adopt_states()
        return self._hyperparameters.send(touched)

    def blank_rows(self) -> HyperparameterTable:
        """Return rows in memory of their own, for kernels that are recorded; they follow others before each launch."""
        return HyperparameterTable(row_of={}, blocks=[torch.full_like(d.lengths, -1) for d in self._tables])

    def launch(self, rows: HyperparameterTable, *, factor: float | Tensor, is_reduced: bool) -> None:
        """Queue the kernels; this alone may be part of a CUDA graph. See ``launch_range``."""
        synchronize_streams(self._flat_params.devices)
        for rank, d in enumerate(self._tables):
            scale = self._factor_on(d.device, factor)
            with queueing_on(d.device):
                for span in self.whole:
                    self.launch_range(span, rank, rows, factor=scale, is_reduced=is_reduced)
        synchronize_streams(self._flat_params.devices)

    @staticmethod
    def _factor_on(device: torch.device, factor: float | Tensor) -> Tensor | None:
        if isinstance(factor, Tensor):
            return comm.copy(factor.float(), device)
        return None if factor == 1 else torch.full((), factor, dtype=torch.float32, device=device)

    def uncount(self, counted: set[int]) -> None:
        """Take an update of parameters back that ``finish`` has counted, and the kernels left out."""
        for d in self._tables:
            d.uncount(counted)

    def finish(self, touched: set[int]) -> None:
        """Keep the states as the stock optimizers would, once the kernels are queued."""
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        group_of = {i: groups[id(self._flat_params.params[i])] for i in touched}
        for d in self._tables:
            d.count_update(group_of)
        self._hyperparameters.count_update(touched)

    def reduce_range(self, span: BlockRange, rank: int, rows: HyperparameterTable, grads: Tensor) -> None:
        """Queue the addition of one device's blocks to where ``is_reduced`` has it looked for; see ``launch_range``."""
        from everygpu.step.kernels import reduce  # needs Triton, which not every machine has

        d = self._tables[rank]
        reduce.run(grads, d.own_grads, d.squares, rows.blocks[rank], d.lengths, d.status, span=span, rank=rank)

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
            rank: Which device.
            rows: What ``prepare`` returned.
            is_reduced: Each device's own chunk of the gradients is the sum of all already.
            factor: What the gradients are multiplied by, if by anything; shape (), on the device.
            grads: Where the gradients are, if not in the flat parameters: all devices' addresses for each block.
        """
        d = self._tables[rank]
        if grads is None:
            grads = d.own_grads if is_reduced else d.grads
        status = d.unread_status if is_reduced else d.status
        tables = (d.values, d.state_blocks, rows.blocks[rank], d.lengths, d.options, status)
        self._rule.launch(grads, *tables, factor=d.one if factor is None else factor, span=span, rank=rank)
