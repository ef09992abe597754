"""The model's forward and backward, captured for a step that can't be captured as a whole."""

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from everygpu.parallel.call import PerReplica
from everygpu.parallel.cuda_graphs.capture import Capture
from everygpu.parallel.cuda_graphs.captured_forward import CapturedForward, Prepared
from everygpu.parallel.cuda_graphs.guards import find_hooks
from everygpu.parallel.cuda_graphs.multi_gpu_graph import MultiGpuGraph
from everygpu.parallel.cuda_graphs.replay import ForwardGraphs, Gradients
from everygpu.parallel.cuda_graphs.static_batch import StaticBatch
from everygpu.parallel.engines.engine import Wrapper

if TYPE_CHECKING:
    from everygpu.step.sharded_update import ShardedUpdate


class StepGradients:
    """Each device's gradients, which the captured backward has added to the step's own memory."""

    def __init__(self, strategy: "ShardedUpdate", touched: set[int]) -> None:
        self.params = strategy.flat_params.params
        self._strategy = strategy
        self._touched = touched

    def begin(self) -> None:
        return

    def take(self) -> list[Tensor | None]:
        self._strategy.flat_params.note_grads(self._touched)
        return [None] * len(self.params)


class StepForward(CapturedForward):
    """Captures forward and backward on the replicas of a step; the loss, and the update, run eagerly.

    Args:
        wrapper: Runs the replicas; a weak reference.
        strategy: The replicas' owner.
        forwarding: Has torch's settings be those that forward runs under.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        strategy: "ShardedUpdate",
        forwarding: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__(wrapper)
        self._strategy = strategy
        self._forwarding = forwarding

    def _make_capture(self, proves: bool) -> Capture[PerReplica]:
        return Capture(
            self._me,
            "TrainStep",
            self._wrapper._route,
            level=logging.DEBUG,  # why the whole step isn't captured was said before
            proves_hooks=True,
            by_replica=self._wrapper.replicas_per_device > 0,
        )

    def state(self) -> Hashable:
        return super().state(), self._strategy.captured_state(has_update=False)

    def unsupported_reason(self) -> str | None:
        return self._strategy.why_not_capturable()

    def needs_proof(self) -> bool:
        return super().needs_proof() or find_hooks(self.roots()) is not None

    def forwarding(self) -> AbstractContextManager[Any]:
        return self._forwarding()

    def prepare(self) -> Prepared:
        self._replicas = self._strategy.current_replicas()
        self._modules = self._replicas.refresh(range(len(self._devices)))
        return Prepared(params=self._strategy.flat_params.params, leaves=[])

    def capture_work(self, graph: MultiGpuGraph, batch: StaticBatch, prepared: Prepared) -> ForwardGraphs:
        flat_params = self._strategy.flat_params
        try:
            with self._strategy.own_leaves(self.roots(), []):
                flat_params.attach_grads()
                prepared.leaves[:] = [[flat_params.params, *flat_params.twins]]
                return super().capture_work(graph, batch, prepared)
        finally:
            flat_params.put_back()

    def give_up(self, reason: str) -> None:
        super().give_up(reason)
        self._strategy.give_up_captures()

    def _forward(self, batch: StaticBatch, prepared: Prepared) -> PerReplica:
        args, kwargs, _ = batch.read()
        assert self._replicas is not None  # noqa: S101 - ``prepare`` has made them
        return self._wrapper._run_replicas(args, kwargs, replicas=self._replicas)

    def _backward(self, outputs: list[Tensor], seeds: Sequence[Tensor], prepared: Prepared) -> Gradients:
        flat_params = self._strategy.flat_params
        before = flat_params.grad_versions()
        torch.autograd.backward(outputs, seeds)
        return StepGradients(self._strategy, flat_params.touched(before))
