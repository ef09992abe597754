"""An optimizer's step that is spread over the devices: each has a share of gradients and state."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from everygpu import comm, tree
from everygpu.comm.streams import kept_stream, queueing_on
from everygpu.parallel.buckets import update_bucket_bytes
from everygpu.parallel.cuda_graphs.multi_gpu_graph import is_capturing
from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.reducer import BucketQueue, noting_task
from everygpu.parallel.replicas.module_tree import has_hooks, place_module
from everygpu.parallel.replicas.remap import in_place_of
from everygpu.parallel.replicas.replica_set import ReplicaLeaves, ReplicaSet
from everygpu.ranks.group import Group
from everygpu.step.early_update import EarlyUpdate, UpdateByChunks, UpdateInPlace, can_update_early
from everygpu.step.flat_parameters import FlatParameters, PerDevice
from everygpu.step.sharded_optimizer import ShardedOptimizer
from everygpu.step.shards import Shards, all_params
from everygpu.step.step_forward import StepForward
from everygpu.step.strategy import StockUpdate, UpdateStrategy
from everygpu.step.update import Shares


class FlatBucket:
    """A flat bucket of a device's gradients, reduced where backward leaves them, without a copy."""

    def __init__(self, flat: Tensor, num_params: int) -> None:
        self.flat = flat
        self._num_params = num_params
        self.begin()

    def begin(self) -> None:
        """Start with the gradients of another backward."""
        self.num_left, self.is_sent = self._num_params, False
        self.event: torch.cuda.Event | None = None
        self.wait: Callable[[], None] | None = None

    def start_reduction(self, group: Group) -> None:
        """Start its all-reduce; while a step is captured, note when it may start."""
        self.is_sent = True
        if is_capturing():
            self.event = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
            self.event.record()
        else:
            self.wait = group.all_reduce(self.flat)


class RankSums:
    """Sends each bucket when backward has all of its gradients, in the order of their plans on all ranks.

    A captured graph has no sums in it, as NCCL ends no process group that a CUDA graph refers to: it has an event for
    each bucket, which the sum waits for.

    Source: ``DistributedDataParallel``'s reducer, with ``gradient_as_bucket_view=True``.
    """

    def __init__(self, group: Group, flat_params: FlatParameters) -> None:
        self._group = group
        self._device = flat_params.devices[0]
        self._flat_params = flat_params
        filled = [(plan, flat) for plan, (flat,) in zip(flat_params.plans, flat_params.grads) if plan.numel]
        self._buckets = [FlatBucket(flat, len(plan.slots)) for plan, flat in filled]
        # One without elements has none.
        self._bucket_of = {
            slot.index: bucket for (plan, _), bucket in zip(filled, self._buckets) for slot in plan.slots
        }

    @contextmanager
    def adding_up(self, loss: Tensor) -> Iterator[None]:
        """Sum the gradients of a backward from ``loss`` within; at the end the current stream waits for the sums."""
        for bucket in self._buckets:
            bucket.begin()
        queue = BucketQueue(self._group, lambda: self._buckets, None)
        leaves = self._flat_params.params  # a capture's own, while one is made
        handles = [
            leaves[i].register_post_accumulate_grad_hook(lambda _, bucket=bucket: queue.on_grad(bucket))  # type: ignore[no-untyped-call]
            for i, bucket in self._bucket_of.items()
        ]
        try:
            with noting_task(queue, loss):
                yield
        finally:
            for handle in handles:
                handle.remove()
        queue.send_rest()
        self._wait([bucket.wait for bucket in self._buckets])

    def add_up_replayed(self, events: Sequence[torch.cuda.Event]) -> None:
        """Sum the gradients of a backward that was replayed."""
        waits = []
        with queueing_on(self._device, kept_stream(self._device, "during backward")):
            for event, bucket in zip(events, self._buckets):
                torch.cuda.current_stream().wait_event(event)
                waits.append(self._group.all_reduce(bucket.flat))
        self._wait(waits)

    def take_events(self) -> list[torch.cuda.Event]:
        """Return the moments of the backward that is being captured, for ``add_up_replayed``."""
        return [bucket.event for bucket in self._buckets if bucket.event is not None]

    def _wait(self, waits: Sequence[Callable[[], None] | None]) -> None:
        for wait in waits:
            if wait is not None:
                wait()


MAX_CHANGES = 3
"""Of an optimizer's options besides the learning rate: where they change more often, as by ``OneCycleLR``, updates are
no part of captures, which would have to be made again."""

FIRST_ASKED = 8
"""The update of a process before which ranks first ask each other whether any captures steps; then 16, 32 and so on."""


class ShardedUpdate(UpdateStrategy):
    """Each device holds, reduces and updates its share of the parameters.

    ``fixed`` keeps the replicas' tensors at their addresses, for CUDA graphs; ``may_return``: the stock optimizer may
    step as well.
    """

    is_spread = True

    def __init__(
        self, model: DataParallel, optimizer: ShardedOptimizer, *, fixed: bool = False, may_return: bool = False
    ) -> None:
        super().__init__(model)
        self._fixed = fixed
        self._sharded = optimizer
        self._replicas: ReplicaSet | None = None
        self._rank_sums: RankSums | None = None
        self._touched: set[int] = set()
        self._flags: Tensor | None = None
        self._num_arrangements = 0
        self._has_kernels = False
        self._options: Any = None
        self._num_changes = 0
        self.flat_params: FlatParameters
        """Parameters and gradients; others after ``prepare`` has found others."""
        self._may_return = may_return
        self._is_given_up = False
        self._is_in_forward = False
        """Where the last forward has not returned: what a capture has failed at is the model."""
        self._num_begun = 0
        self._arrange(self._trainable(), None)

    def prepare(self) -> None:
        self._sharded.check_owner()
        params = self._trainable()
        if not (self._is_arranged and self.flat_params.fits(params)) or self.flat_params.is_held():
            self._arrange(params, self.flat_params)
        elif not self._sharded.holds(self._shards):
            self._attach(self._sharded)
        self.flat_params.follow_edits()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        captured = self.captured_forward
        self._is_in_forward = True
        if captured is None and len(self._model.replica_devices) == 1:
            output = super().forward(*inputs, **kwargs)
        else:
            output = self._model.forward_with(self.current_replicas(), inputs, kwargs, captured)
        self._is_in_forward = False
        return output

    def current_replicas(self) -> ReplicaSet:
        """Return the replicas of the model's present module, whose parameters are the step's."""
        if self._replicas is None or self._replicas.module is not self._model.module:
            self._replicas = self._model.make_replicas(self._make_leaves, fixed=self._fixed)
        return self._replicas

    def leaves(self) -> list[Tensor]:
        # The hooks of a parameter are to see the sum of all replicas' gradients: its replicas are no leaves.
        is_one = len(self._model.replica_devices) == 1
        if is_one and (self.captured_forward is None or not self.captured_forward.was_replayed):
            return []
        return [p for p in self.flat_params.params if not has_hooks(p)]

    def begin(self) -> None:
        self.flat_params.begin()

    def attach_grads(self) -> None:
        self.flat_params.attach_grads()

    def detach_grads(self) -> None:
        self.flat_params.detach_grads()

    @contextmanager
    def _adding_up(self, loss: Tensor) -> Iterator[None]:
        self._is_added_up = self._rank_sums is not None
        with nullcontext() if self._rank_sums is None else self._rank_sums.adding_up(loss):
            yield

    def flags(self) -> Tensor | None:
        touched, num, device = self.flat_params.touched(), len(self.flat_params.params), self.flat_params.devices[0]
        if len(touched) == num:
            return torch.ones(num, device=device)  # no copy from the host
        return torch.tensor([float(i in touched) for i in range(num)]).to(device, non_blocking=True)

    def take_flags(self, flags: Tensor | None) -> None:
        self._flags = flags

    def reduce(self) -> Shares:
        self._touched = self.flat_params.touched()
        self.flat_params.reduce()
        chunks = self.flat_params.chunks(self.flat_params.grads)
        if self._group is not None:
            self._touched = self._add_up_ranks(self._group, chunks)
        return [list(column) for column in zip(*chunks)]

    def _add_up_ranks(self, group: Group, chunks: list[PerDevice]) -> set[int]:
        """Add each device's part up with those of the same device on other ranks; return what any has a gradient of."""
        pieces = () if self._is_added_up else (chunk for bucket in chunks for chunk in bucket if chunk.numel())
        for wait in [group.all_reduce(chunk) for chunk in pieces]:
            wait()
        self._is_added_up = False
        if self._flags is None or len(self._touched) == len(self.flat_params.params):
            return self._touched
        return {i for i, flag in enumerate(self._flags.tolist()) if flag}  # the host waits for the step

    def fold(self) -> None:
        self.flat_params.fold()

    def apply(self, found_inf: Tensor | None) -> None:
        can_skip = self._shards.prepare(self._sharded.param_groups, self._touched)
        if found_inf is not None and not can_skip:
            if found_inf.item():
                return
            found_inf = None
        if self._sharded.has_pre_hooks():
            with self.flat_params.whole_grads(self._touched):
                self._sharded.before_step()
            self._shards.prepare(self._sharded.param_groups, self._touched)
        # Forward and hooks may have written parameters; here each device updates its own copy of a chunk.
        self.flat_params.follow_edits()
        places = None if found_inf is None else comm.copy_to_each(found_inf, self._shards.devices)
        self.flat_params.begin_update()
        try:
            self._shards.step(self._touched, places)
        finally:  # an interruption in here has the next step send the primary's
            self.flat_params.all_gather_params()
        self._sharded.after_step()

    def refresh(self) -> None:
        self.prepare()
        self.flat_params.adopt()
        if self._replicas is not None:
            self._replicas.forget()

    def copies(self) -> dict[int, list[Tensor]]:
        frozen = {} if self._replicas is None else self._replicas.frozen_copies()
        return frozen | self.flat_params.copies()

    def stop_capturing(self, forwarding: Callable[[], AbstractContextManager[Any]]) -> None:
        """Capture no whole steps any more, but the model's forward and backward; under ranks the plain loop does so."""
        if self._group is None and not self._is_in_forward:
            self.captured_forward = StepForward(weakref.proxy(self._model), self, forwarding)
        else:
            self.give_up_captures()

    def give_up_captures(self) -> None:
        """Continue as a plain loop where possible, from the next update: nothing of a step will be captured."""
        self.captured_forward, self._is_given_up = None, True

    def settle(self) -> UpdateStrategy:
        """Return the plain loop where nothing is captured. Ranks do so together, and ask each other at some updates."""
        is_due = self._is_given_up
        if self._group is not None and self._may_return:
            self._num_begun += 1
            asks = self._num_begun >= FIRST_ASKED and self._num_begun & (self._num_begun - 1) == 0
            is_due = asks and self._group.begin_max([not self._is_given_up])() == [0]
        if not (is_due and self._may_return):
            return self
        self._sharded.return_to_stock_optimizer()
        return StockUpdate(self._model, self._sharded.module)

    # How a step is captured.

    @contextmanager
    def own_leaves(self, roots: Sequence[nn.Module], bypassed: list[Tensor]) -> Iterator[None]:
        """Replace the modules' parameters by new leaves for the backward of a step within.

        What has a parameter itself, as a loss with a list of them, uses that: ``bypassed`` gets such parameters.
        """
        params = self.flat_params.params
        before, written = [p.grad for p in params], self.flat_params.grad_versions()
        for p in params:
            p.grad = None
        try:
            with self.flat_params.in_new_leaves() as (first, *others), ExitStack() as stack:
                if self._model.rank_model is not None:
                    stack.enter_context(self._model.rank_model.with_stand_ins(self._model.module))
                for root in roots:
                    stack.enter_context(in_place_of(root, first))
                if self._replicas is not None:
                    stack.enter_context(self._replicas.with_leaves(others))
                yield
        finally:
            bypassed += [p for p in params if p.grad is not None]
            for p, grad in zip(params, before):
                p.grad = grad
            self.flat_params.disregard(written)

    def captured_state(self, *, has_update: bool) -> Any:
        """Return which addresses, arrangements and options a capture depends on, with the update in it or without."""
        options = self._early_options() if has_update else None
        return self._num_arrangements, None if options is None else (self._shards.version, options)

    def is_ready(self) -> bool:
        """Do what ``prepare`` does, where the module is known to be as it was; False where that is not enough."""
        params = self._trainable()
        if not tree.are_same(params, self.flat_params.params):
            return False
        if not self._sharded.holds(self._shards):
            return False
        self._sharded.check_owner()
        self.flat_params.send_written()
        if self._replicas is not None:
            self._replicas.send_forgotten()  # a replay sends no frozen parameters
        return True

    def why_not_capturable(self) -> str | None:
        """Say what would be lost or frozen in a capture, if anything is."""
        # Not those of the flat parameters: asked before ``prepare`` has seen what was unfrozen or added.
        mine = set(map(id, self._trainable()))
        others = [n for n, p in self._model.module.named_parameters() if p.requires_grad and id(p) not in mine]
        return f"parameter {others[0]} takes gradients, but the optimizer doesn't have it" if others else None

    def early_update(self, *, overlap_backward: bool, checks: bool) -> EarlyUpdate | None:
        """Return what queues reduction and update with a backward that is captured; None where that can't be."""
        shards = self._shards
        if self._early_options() is None:
            return None
        if not shards.prepare(self._sharded.param_groups, self._touched):
            return None
        # A step that is left out: what it makes and loads isn't to be made and loaded while capturing.
        shards.step(self._touched, [torch.ones((), dtype=torch.float32, device=d) for d in shards.devices])
        kind = UpdateInPlace if len(shards.devices) == 1 else UpdateByChunks
        return kind(self.flat_params, shards, self._touched, overlap_backward=overlap_backward, checks=checks)

    def prepare_update(self) -> None:
        """Write the current learning rates for a captured update."""
        self._shards.follow(self._sharded.param_groups)
        self.flat_params.begin_update()

    def finish_update(self) -> None:
        """Note an update that a replay has queued."""
        self.flat_params.note_update()
        self._sharded.after_step()

    def moments(self) -> list[torch.cuda.Event]:
        """Return when the backward that is being captured has each bucket to be all-reduced."""
        return [] if self._rank_sums is None else self._rank_sums.take_events()

    def note_grads(self, touched: set[int], moments: Sequence[torch.cuda.Event]) -> None:
        """Note a backward that a replay has queued, and all-reduce its gradients."""
        self.flat_params.note_grads(touched)
        self._is_added_up = bool(moments)
        if self._rank_sums is not None and moments:
            self._rank_sums.add_up_replayed(moments)

    def _early_options(self) -> Any:
        """Return the options of a captured update; None if updates aren't captured.

        That includes hooks that see whole gradients between reduction and update.
        """
        if not (self._has_kernels and self._shards.fuses) or self._sharded.has_pre_hooks():
            return None
        options = self._shards.fixed_options(self._sharded.param_groups)
        self._num_changes += self._options is not None and options != self._options
        self._options = options
        return options if self._num_changes <= MAX_CHANGES else None

    def _trainable(self) -> list[Tensor]:
        """Return the parameters that are spread over the devices."""
        return [p for p in all_params(self._sharded) if p.requires_grad]

    @torch.inference_mode(False)
    def _arrange(self, params: list[Tensor], before: FlatParameters | None) -> None:
        """Make memory for the parameters as they are now, going on from what has accumulated before."""
        self._is_arranged = False  # until all is: what is interrupted is done again
        model = self._model
        place_module(model.module, model.replica_devices[0], "TrainStep", strict=model.strict_device)
        bucket_bytes = update_bucket_bytes(params, model.bucket_cap_mb, over_ranks=self._group is not None)
        whole, size = self._sharded.whole, model.replicas_per_device
        devices, num_chunks = model.replica_devices[:: size or 1], len(model.replica_devices) if size else 0
        self.flat_params = FlatParameters(params, devices, bucket_bytes, whole=whole, num_chunks=num_chunks)
        if before is not None:
            self.flat_params.take_grads(before)
        self._replicas, self._rank_sums = None, None
        # Gloo's sums of GPUs' gradients have the host wait.
        group, is_on_one = self._group, len(model.replica_devices) == 1
        if group is not None and is_on_one and (group.uses_nccl or model.replica_devices[0].type == "cpu"):
            self._rank_sums = RankSums(group, self.flat_params)
        self._attach(self._sharded)
        self.flat_params.count_own_uses()
        self._is_arranged = True

    def _attach(self, optimizer: ShardedOptimizer) -> None:
        """Make the optimizer's state on the devices of the gradients."""
        flat_params = self.flat_params
        self._num_arrangements += 1
        values, grads = flat_params.chunks(flat_params.values), flat_params.chunks(flat_params.grads)
        self._shards = Shards(
            optimizer.module, flat_params.params, flat_params.plans, values, grads, fuses=True, whole=optimizer.whole
        )
        optimizer.attach(flat_params.params, self._shards)
        self._has_kernels = can_update_early(flat_params, self._shards)

    def _make_leaves(self) -> ReplicaLeaves:
        self.flat_params.adopt()
        twins = {id(p): list(row) for p, *row in zip(self.flat_params.params, *self.flat_params.twins)}
        return {id(p): twins[id(p)] for p in self.leaves()}
