"""Gradients of a helper's replica on their way to the main process, bucket by bucket while backward goes on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from everygpu.parallel.engines.processes.messages import BucketDone, Buckets, SparseGrad
from everygpu.parallel.engines.processes.module_receiver import Binding
from everygpu.parallel.engines.processes.packing import CannotTravelError
from everygpu.parallel.engines.processes.shared_tensors import Exporter, SharedTensor


class GradientSender:
    """Sends each bucket as soon as all of its gradients are there, and the others when backward is over.

    Of each bucket one parameter is watched, that which gets its gradient last. Where a parameter gets its gradient in
    several parts, as from reentrant activation checkpoints, all buckets are sent when backward is over: so they are in
    the first backward, too, which finds that out.

    Args:
        device: The helper's.
        exporter: Lends the buckets' memory.
        complete: Where hooks put each parameter whose gradient is complete: in C, as it is done for all of them.
        say: Sends what a function makes of a flag.
    """

    def __init__(
        self, device: torch.device, exporter: Exporter, complete: list[Tensor], say: Callable[[Any], None]
    ) -> None:
        self._device = device
        self._exporter = exporter
        self._complete = complete
        self._say = say
        self.touched: list[int] = []
        """Parameters that have got a gradient in the main process's memory in the last backward."""
        self._handles: dict[int, RemovableHandle] = {}  # by bucket
        self._unsent: set[int] = set()
        self._sends_early = self._has_parts = False
        self._call = 0
        self._flats: dict[int, tuple[Tensor, SharedTensor]] = {}  # by bucket, where they stay
        self._binding = Binding(tensors={}, grads={}, buckets=Buckets([], stay=False))
        self._bind(self._binding)

    @contextmanager
    def collecting(self, call: int, binding: Binding) -> Iterator[None]:
        """Send what a backward within computes.

        Args:
            call: That the backward is of.
            binding: Of its forward.
        Raises:
            RuntimeError: a gradient has got another part after it was sent.
        """
        if binding is not self._binding:
            self._bind(binding)
        self._clear()
        for index, grad in binding.grads.items():
            binding.tensors[index].grad = grad
        self._call, self._unsent = call, set(range(len(binding.buckets.members)))
        try:
            yield
            for bucket in sorted(self._unsent):
                self._send(bucket)
            found = set(map(id, self._complete))
            self._has_parts |= len(found) < len(self._complete)
            self._sends_early = not self._has_parts
            self._check_rest()
            self.touched = [i for i in sorted(binding.grads) if id(binding.tensors[i]) in found]
        finally:
            self._unsent = set()
            self._clear()

    @contextmanager
    def refused(self, binding: Binding) -> Iterator[None]:
        """Have no gradients be computed within but those that ``torch.autograd.grad`` returns.

        Args:
            binding: Of the forward.
        Raises:
            CannotTravelError: a backward within has led to parameters.
        """
        self._complete.clear()
        yield
        if self._complete:
            for t in binding.tensors.values():
                t.grad = None
            raise CannotTravelError("forward runs a backward of its own to the parameters")

    def _bind(self, binding: Binding) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
        if binding.buckets is not self._binding.buckets:
            self._sends_early, self._flats = False, {}
        self._binding = binding
        self._trained = [t for t in binding.tensors.values() if t.requires_grad]
        self._members = [[binding.tensors[i] for i in members] for members, _ in binding.buckets.members]
        for bucket, members in enumerate(self._members):
            self._watch(bucket, members[0])

    def _watch(self, bucket: int, t: Tensor) -> None:
        """Have a parameter's gradient be the one after which a bucket may be complete."""
        if bucket in self._handles:
            self._handles[bucket].remove()
        self._handles[bucket] = t.register_post_accumulate_grad_hook(lambda _: self._check(bucket))  # type: ignore[no-untyped-call]

    def _check(self, bucket: int) -> None:
        """Send a bucket if it is complete; else look again after the gradient of one that is missing."""
        if self._sends_early and bucket in self._unsent:
            missing = next((t for t in self._members[bucket] if t.grad is None), None)
            if missing is None:
                self._send(bucket)
            else:
                self._watch(bucket, missing)

    def _check_rest(self) -> None:
        if any(t.grad is not None for members in self._members for t in members):
            raise RuntimeError(
                "DataParallel: a parameter must get its gradient at once, as in the backwards before, got another part "
                "of it, as reentrant checkpoints give. Call zero_grad() and run the step again."
            )

    def _clear(self) -> None:
        self._complete.clear()
        for t in self._trained:
            t.grad = None

    def _send(self, bucket: int) -> None:
        self._unsent.discard(bucket)
        members = self._members[bucket]
        grads = [t.grad for t in members]
        if all(g is None for g in grads):
            return
        for t in members:
            t.grad = None
        dense = {k: g for k, g in enumerate(grads) if g is not None and g.layout is torch.strided}
        sparse = {k: self._describe(g) for k, g in enumerate(grads) if g is not None and k not in dense}
        call, lent = self._call, None
        if dense:
            lent = self._flatten(bucket, dense)
        present = [k in dense for k in range(len(grads))]
        self._say(
            lambda ready: BucketDone(call=call, ready=ready, bucket=bucket, flat=lent, present=present, sparse=sparse)
        )

    def _flatten(self, bucket: int, grads: dict[int, Tensor]) -> SharedTensor:
        members, stay = self._binding.buckets
        plan = members[bucket][1]
        if not stay:
            return self._exporter.describe(plan.flatten(grads, self._device), lends=True)
        flat, described = self._flats.get(bucket, (None, None))
        if flat is None or described is None or self._exporter.is_lent(described):  # not read yet
            flat = plan.make_flat(self._device)
            described = self._exporter.describe(flat)
        plan.fill(flat, grads)
        described = self._exporter.lend_again(flat, described)
        self._flats[bucket] = flat, described
        return described

    def _describe(self, grad: Tensor) -> SparseGrad:
        grad = grad.coalesce()
        indices, values = (self._exporter.describe(t, lends=True) for t in (grad.indices(), grad.values()))
        return SparseGrad(indices=indices, values=values, shape=tuple(grad.shape))
