"""Gradients of a helper's replica on their way to the main process, bucket by bucket while backward goes on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from everygpu.parallel.engines.processes.messages import BucketDone, SparseGrad
from everygpu.parallel.engines.processes.module_receiver import Binding
from everygpu.parallel.engines.processes.packing import CannotTravelError
from everygpu.parallel.engines.processes.shared_tensors import Exporter


class GradientSender:
    """Sends each bucket as soon as all of its gradients are there, and the others when backward is over.

    Args:
        device: The helper's.
        exporter: Lends the buckets' memory.
        say: Sends what a function makes of a flag.
    """

    def __init__(self, device: torch.device, exporter: Exporter, say: Callable[[Any], None]) -> None:
        self._device = device
        self._exporter = exporter
        self._say = say
        self._binding = Binding(tensors={}, grads={}, buckets=())
        self._bucket_of: dict[int, int] = {}
        self._waiting: list[int] = []
        self._call: int | None = None
        self._touched: set[int] = set()

    @contextmanager
    def collecting(self, call: int, binding: Binding) -> Iterator[None]:
        """Send what a backward within computes.

        Args:
            call: That the backward is of.
            binding: Of its forward.
        """
        self._binding = binding
        for index, t in binding.tensors.items():
            if t.requires_grad:
                t.grad = binding.grads.get(index)
        self._touched = set()
        self._bucket_of = {i: k for k, (members, _) in enumerate(binding.buckets) for i in members}
        self._waiting = [len(members) for members, _ in binding.buckets]
        self._call = call
        try:
            yield
            for bucket, left in enumerate(self._waiting):
                if left:
                    self._send(bucket)
        finally:
            self._call = None
            for t in binding.tensors.values():
                t.grad = None

    def note(self, index: int) -> None:
        """Take note of a gradient that is complete.

        Raises:
            CannotTravelError: no backward of the main process is under way, but one within forward.
        """
        if self._call is None:
            raise CannotTravelError("forward runs a backward of its own to the parameters")
        self._touched.add(index)
        bucket = self._bucket_of.get(index)
        if bucket is not None:
            self._waiting[bucket] -= 1
            if not self._waiting[bucket]:
                self._send(bucket)

    def take_touched(self) -> list[int]:
        """Return the parameters that have got a gradient in the main process's memory."""
        return sorted(i for i in self._touched if i in self._binding.grads)

    def _send(self, bucket: int) -> None:
        members, plan = self._binding.buckets[bucket]
        grads = [self._binding.tensors[i].grad for i in members]
        if all(g is None for g in grads):
            return
        for i in members:
            self._binding.tensors[i].grad = None
        dense = {k: g for k, g in enumerate(grads) if g is not None and g.layout == torch.strided}
        sparse = {k: self._describe(g) for k, g in enumerate(grads) if g is not None and k not in dense}
        call, lent = self._call, None
        if dense:
            lent = self._exporter.describe(plan.flatten(dense, self._device), lends=True)
        present = [k in dense for k in range(len(grads))]
        self._say(
            lambda ready: BucketDone(
                call=call or 0, ready=ready, bucket=bucket, flat=lent, present=present, sparse=sparse
            )
        )

    def _describe(self, grad: Tensor) -> SparseGrad:
        grad = grad.coalesce()
        indices, values = (self._exporter.describe(t, lends=True) for t in (grad.indices(), grad.values()))
        return SparseGrad(indices=indices, values=values, shape=tuple(grad.shape))
