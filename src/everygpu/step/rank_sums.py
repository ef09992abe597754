"""Gradients of a training step added up over ranks while backward goes on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from everygpu.comm.streams import kept_stream, queueing_on
from everygpu.errors import CallError
from everygpu.parallel.cuda_graphs.multi_gpu_graph import is_capturing
from everygpu.ranks.group import Group
from everygpu.step.flat_parameters import FlatParameters


class RankSums:
    """Sends each bucket when backward has all of its gradients, in the order of their plans on all ranks.

    Buckets are added up where backward leaves them, without a copy. A recording has no sums in it, as NCCL ends no
    process group that a CUDA graph refers to: it has an event for each bucket, which the sum waits for.

    Source: ``DistributedDataParallel``'s reducer, with ``gradient_as_bucket_view=True``.
    """

    def __init__(self, group: Group, flat_params: FlatParameters) -> None:
        self._group = group
        self._device = flat_params.devices[0]
        self._params = flat_params.params
        filled = [(plan, flat) for plan, (flat,) in zip(flat_params.plans, flat_params.grads) if plan.numel]
        self._flats = [flat for _, flat in filled]
        self._members = [{id(self._params[slot.index]) for slot in plan.slots} for plan, _ in filled]
        self._bucket_of = {key: b for b, members in enumerate(self._members) for key in members}
        self._begin()

    def _begin(self) -> None:
        self._left = [set(members) for members in self._members]
        self._events: list[torch.cuda.Event] = []
        self._waits: list[Callable[[], None]] = []
        self._num_sent = 0

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        """Add up the gradients of a backward within; at the end the current stream waits for the sums."""
        self._begin()
        handles = [p.register_post_accumulate_grad_hook(self._take) for p in self._params]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        while self._num_sent < len(self._flats):
            self._send_next()
        self._wait()

    def add_up_recorded(self, events: Sequence[torch.cuda.Event]) -> None:
        """Add up the gradients of a backward that was launched."""
        with queueing_on(self._device, kept_stream(self._device, "beside backward")):
            for event, flat in zip(events, self._flats):
                torch.cuda.current_stream().wait_event(event)
                self._waits.append(self._group.all_reduce(flat))
        self._wait()

    def take_events(self) -> list[torch.cuda.Event]:
        """Return the moments of the backward that is being recorded, for ``add_up_recorded``."""
        events, self._events = self._events, []
        return events

    def _take(self, p: Tensor) -> None:
        b = self._bucket_of.get(id(p))
        if b is None:  # has no elements
            return
        if b < self._num_sent:
            raise CallError(
                "TrainStep: a parameter got its gradient twice in one backward, as by reentrant checkpoints, after it "
                "was sent to other ranks. Call torch.utils.checkpoint.checkpoint with use_reentrant=False."
            )
        self._left[b].discard(id(p))
        while self._num_sent < len(self._flats) and not self._left[self._num_sent]:
            self._send_next()

    def _send_next(self) -> None:
        flat = self._flats[self._num_sent]
        self._num_sent += 1
        if is_capturing():
            event = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._waits.append(self._group.all_reduce(flat))

    def _wait(self) -> None:
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()
