"""A training step as a capture sees it."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from everygpu.errors import CaptureError
from everygpu.parallel.cuda_graphs.capture import Capturable, Capture
from everygpu.parallel.cuda_graphs.guards import find_hooks
from everygpu.parallel.cuda_graphs.host_rng import draw_seeds
from everygpu.parallel.cuda_graphs.multi_gpu_graph import MultiGpuGraph
from everygpu.parallel.cuda_graphs.static_batch import Batch, StaticBatch
from everygpu.parallel.data_parallel import overridden
from everygpu.step.early_update import EarlyUpdate
from everygpu.step.loss import roots_of
from everygpu.step.options import autocast
from everygpu.step.sharded_update import ShardedUpdate
from everygpu.step.strategy import UpdateStrategy

if TYPE_CHECKING:
    from everygpu.step.train_step import TrainStep

logger = logging.getLogger("everygpu")


class _Captured(NamedTuple):
    """What a capture of a step has in it."""

    loss: Tensor
    touched: set[int]
    """Parameters that get a gradient."""
    update: EarlyUpdate | None
    """None where that is left to be done."""
    norm: Tensor | None = None
    """Of the gradient, where the update waits for all of it."""
    moments: Sequence[torch.cuda.Event] = ()
    """When backward has each bucket that is all-reduced."""


class CapturableStep(Capturable[Tensor]):
    """A ``TrainStep`` as ``Capture`` sees it: the backward, and the update where kernels do it all.

    ``must`` has hooks left out where there are any: the caller has said so.
    """

    def __init__(self, step: "TrainStep", strategy: ShardedUpdate, *, must: bool) -> None:
        self._step = step
        self._strategy = strategy
        self._must = must
        self._overlaps_backward = True
        self._has_own_leaves = True
        """Whether captures go backward to leaves of their own; not where a loss has parameters that it took before."""
        self._is_bypassed = False

    def roots(self) -> list[nn.Module]:
        return roots_of(self._step.model, self._step.loss)

    def state(self) -> Any:
        step, model = self._step, self._step.model
        rules = (model.split, model.dim, model.engine, model.gather_rule, model.buffers_rule, model.output_device)
        options = (step.accumulate, step.clip_norm, overridden(model), *rules)
        waits = step._finite_check.is_whole
        return (
            self._strategy.captured_state(has_update=self._updates_at_once()),
            waits,
            options,
        )

    def others(self) -> list[Any]:
        return [self._step.loss]

    def unsupported_reason(self) -> str | None:
        return self._strategy.why_not_capturable()

    def needs_proof(self) -> bool:
        """Whether there are hooks of forward, which are called by no replay."""
        first, *others = self.roots()
        if self._must or (find_hooks([first]) is None and find_hooks(others) is None):
            return False
        if (reason := find_hooks(others)) is not None:
            raise CaptureError(reason)
        return True

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        with torch.enable_grad(), autocast(self._step._home, self._step._dtype):
            yield

    def prepare(self) -> EarlyUpdate | None:
        self._strategy.prepare()
        if not self._updates_at_once():
            return None
        checks = self._step._finite_check.is_on
        # Applied in part, an update that isn't finite would tell whether it was captured.
        is_alike = checks and self._strategy.flat_params.by_tree
        needs_all = self._step.clip_norm is not None or self._step._finite_check.is_whole or is_alike
        return self._strategy.early_update(overlap_backward=self._overlaps_backward and not needs_all, checks=checks)

    def capture_work(self, graph: MultiGpuGraph, batch: StaticBatch, prepared: EarlyUpdate | None) -> _Captured:
        draw_seeds(self.roots(), self._step.model.replica_devices)
        bypassed: list[Tensor] = []
        own_leaves = self._strategy.own_leaves(self.roots(), bypassed) if self._has_own_leaves else nullcontext()
        try:
            with own_leaves, self._step.model._drawing_by(graph.random_of):
                captured = graph.capture(lambda: self._run(batch.read(), prepared))
            self._is_bypassed = bool(bypassed) and not self._strategy.flat_params.by_tree
            if bypassed:
                raise CaptureError("the loss has parameters that it took out of the model before")
        finally:
            self._strategy.flat_params.put_back()
        if captured.update is not None:
            captured.update.finish_capture()
        return captured

    def _run(self, batch: Batch, update: EarlyUpdate | None) -> _Captured:
        step, before = self._step, self._strategy.flat_params.grad_versions()
        loss = step._learn(batch, update)
        if update is None:
            if self._strategy.flat_params.has_direct_grads:
                raise CaptureError("the loss computes with parameters itself")
            # Not those of previous batches, which this update may also have.
            touched, moments = self._strategy.flat_params.touched(before), self._strategy.moments()
            return _Captured(loss, touched, None, moments=moments)
        norm = update.queue(step.clip_norm)
        return _Captured(loss, update.touched, update, norm)

    def try_otherwise(self) -> bool:
        if self._is_bypassed:
            self._has_own_leaves = self._is_bypassed = False
            return True
        # A parameter may be needed in backward after its own gradient is there: then updates have to wait. Where that
        # doesn't help, other kinds of batches begin with updates that overlap backward again.
        overlapped, self._overlaps_backward = self._overlaps_backward, not self._overlaps_backward
        return overlapped and self._updates_at_once()

    def give_up(self, reason: str) -> None:
        self._step._finite_check.wait()  # for kernels' updates that are not to count
        self._strategy.stop_capturing(self.forwarding)

    def begin(self, captured: _Captured) -> bool:
        if not self._strategy.is_ready():
            return False
        if captured.update is None:
            if self._step._num_batches == 0:
                self._strategy.begin()
            return True
        if self._step._replica_check is not None:
            self._step._replica_check.before_update()
        self._strategy.prepare_update()
        return True

    def finish(self, captured: _Captured) -> Tensor:
        if captured.update is None:
            self._strategy.note_grads(captured.touched, captured.moments)
        else:
            self._strategy.finish_update()
            self._step._finish_replayed(captured.update.status, captured.norm)
        return captured.loss.clone()

    def _updates_at_once(self) -> bool:
        step = self._step
        # A check before each update must also find what flipped in forward and backward.
        is_left = step._replica_check is not None and step._replica_check.every == 1
        return step.accumulate == 1 and step._scale is None and step._ranks is None and not is_left


def make_capture(step: "TrainStep", strategy: UpdateStrategy, *, must: bool) -> Capture[Tensor] | None:
    """Return the capture of a step; None if it can't be captured."""
    model = step.model
    if not isinstance(strategy, ShardedUpdate):
        logger.info("TrainStep: whole steps aren't CUDA graphs, as the optimizer can't be spread.")
        return None
    # With several devices, the engine that takes over says why where it is slower.
    level = logging.WARNING if len(model.replica_devices) == 1 else logging.INFO
    work = CapturableStep(step, strategy, must=must)
    return Capture(
        work,
        "TrainStep",
        model._route,
        must=must,
        level=level,
        proves_hooks=True,
        gives_up=not must,
        by_replica=model.replicas_per_device > 0,
    )
