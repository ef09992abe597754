"""Gradients added up while backward goes on, or updated from, where backward leaves them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from everygpu import comm
from everygpu.comm.streams import queueing_on
from everygpu.parallel.cuda_graphs.ready_events import ReadyEvents
from everygpu.parallel.cuda_graphs.transfer.grad_tables import GradTables
from everygpu.step.flat_parameters import FlatParameters
from everygpu.step.fused import FusedUpdate

_LOSS = -1
"""Stands among the buckets for what is done when the loss is there."""


class EarlyUpdate:
    """Takes each bucket when all devices have its gradients, beside what is left of the backward; when recording.

    Beside backward it is updated, or only added up, where the update has to know all gradients. A recording's memory
    stays where it is: gradients are read where backward has put them.

    Args:
        flat_params: The parameters, on CUDA devices.
        fused: Their update.
        expected: Parameters that will probably get a gradient: a bucket waits for those of its own.
        beside: Update beside backward; else after it.
    """

    def __init__(self, flat_params: FlatParameters, fused: FusedUpdate, expected: set[int], *, beside: bool) -> None:
        self.rows = fused.blank_rows()
        """Written before each launch."""
        self._expected = expected
        self._flat_params = flat_params
        self._fused = fused
        self._is_beside = beside
        self._marks = ReadyEvents(flat_params.devices)
        self._touched: set[int] = set()
        self._is_checked = False
        self._factors: list[Tensor | None] = [None] * len(flat_params.devices)
        self._sources = GradTables(flat_params.plans, flat_params.devices, flat_params.devices)

    @property
    def status(self) -> Tensor:
        """Of the update; see ``FiniteCheck``."""
        return self._fused.status

    def check(self, loss: Tensor) -> None:
        """Have the update be left out where the loss, of shape (), isn't finite; before the backward."""
        self._is_checked = True
        self._fused.begin(loss)
        self._marks.mark(_LOSS)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take the gradients of a backward within, and mark when each device has all of a bucket.

        Raises:
            RuntimeError: torch's, in backward, where a parameter is needed after its gradient is complete.
        """
        self._clear()
        handles = []
        try:
            for b, plan in enumerate(self._flat_params.plans):
                for replica, tensors in enumerate(self._replicas()):
                    members = {slot.index: tensors[slot.index] for slot in plan.slots}
                    # An event is noted anew at each gradient that comes once all expected ones are there.
                    note = self._marks.counter(b, replica, [t for i, t in members.items() if i in self._expected])
                    handles += [self._on_accumulation(t, note) for t in members.values()]
            yield
            self._touched = {i for tensors in self._replicas() for i, t in enumerate(tensors) if t.grad is not None}
            self._take_grads()
        finally:
            for handle in handles:
                handle.remove()
            self._clear()

    def touched(self) -> set[int]:
        """Return the parameters that got a gradient, on any device."""
        return self._touched

    def launch(self, clip_norm: float | None = None) -> Tensor | None:
        """Queue the kernels, and have the devices' current streams wait for them.

        Args:
            clip_norm: The largest norm that the gradient may have, in an update after backward.
        Returns:
            The norm before that, shape (), if it had to be known.
        """
        if self._is_beside:
            self._run_on_buckets(self._update, has_gate=self._is_checked)
            return None
        self._run_on_buckets(self._reduce)
        return self._fused.update_from_sums(self.rows, clip_norm=clip_norm, is_checked=self._is_checked)

    def _update(self, b: int, rank: int) -> None:
        self._fused.launch_range(
            self._fused.spans[b],
            rank,
            self.rows,
            factor=self._factors[rank],
            is_reduced=False,
            grads=self._sources.tables[rank],
        )

    def _reduce(self, b: int, rank: int) -> None:
        self._fused.reduce_range(self._fused.spans[b], rank, self.rows, self._sources.tables[rank])

    def _used_buckets(self) -> list[int]:
        plans = enumerate(self._flat_params.plans)
        return [b for b, plan in plans if any(slot.index in self._touched for slot in plan.slots)]

    def _send_gate(self) -> None:
        self._factors = list(comm.copy_to_each(self._fused.gate, self._flat_params.devices))

    def _run_on_buckets(self, launch: Callable[[int, int], None], *, has_gate: bool = False) -> None:
        """Have each device do something with its chunk of each bucket, when all have the bucket's gradients.

        Args:
            launch: Called with a bucket and a device.
            has_gate: All devices must have the update's gate before.
        """

        def work(b: int) -> None:
            for rank, d in enumerate(self._flat_params.devices):
                with queueing_on(d):
                    launch(b, rank)

        works: dict[int, Callable[[], None]] = {b: functools.partial(work, b) for b in self._used_buckets()}
        if has_gate:
            works[_LOSS] = self._send_gate
        self._marks.run_beside(works)

    def write_tables(self) -> None:
        """After the recording, before its first launch: tell the kernels where the gradients are."""
        self._sources.write()
        self._sources.forget()

    def _take_grads(self) -> None:
        """Keep all gradients; zeros for those of parameters that only other replicas have one of."""
        for replica, tensors in enumerate(self._replicas()):
            for b, plan in enumerate(self._flat_params.plans):
                touched = [slot.index for slot in plan.slots if slot.index in self._touched]
                if self._sources.take(b, replica, {i: tensors[i].grad for i in touched}):
                    self._marks.forget(b, replica)

    def _replicas(self) -> list[list[Tensor]]:
        return [self._flat_params.params, *self._flat_params.twins]

    def _on_accumulation(self, t: Tensor, note: Callable[[Tensor], None]) -> RemovableHandle:
        def complete(t: Tensor) -> None:
            if self._is_beside:  # from here on its value is not the one that forward saw: backward refuses to use it
                increment_version(t)
            note(t)

        return t.register_post_accumulate_grad_hook(complete)  # type: ignore[no-any-return, no-untyped-call]

    def _clear(self) -> None:
        for tensors in self._replicas():
            for t in tensors:
                t.grad = None
