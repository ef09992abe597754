"""Gradients of a recorded training step, added up over ranks while its backward goes on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from everygpu.comm.streams import kept_stream, queueing_on
from everygpu.parallel.cuda_graphs.ready_events import ReadyEvents
from everygpu.ranks.group import Group
from everygpu.step.flat_parameters import FlatParameters


class RankSums:
    """Adds each bucket up when backward has all of its gradients, where backward leaves them, without a copy.

    A recording has no sums in it, as NCCL ends no process group that a CUDA graph refers to: it has an event for each
    bucket, which the sum waits for. Sums come in the order of the plans on all ranks.

    Source: ``DistributedDataParallel``'s reducer, with ``gradient_as_bucket_view=True``.
    """

    def __init__(self, group: Group, flat_params: FlatParameters) -> None:
        self._group = group
        self._device = flat_params.devices[0]
        filled = [(plan, flat) for plan, (flat,) in zip(flat_params.plans, flat_params.grads) if plan.numel]
        self._flats = [flat for _, flat in filled]
        self._members = [[[flat_params.params[slot.index] for slot in plan.slots]] for plan, _ in filled]
        self._events: list[torch.cuda.Event] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the moments of a backward that is recorded within."""
        marks = ReadyEvents([self._device], is_external=True)
        with marks.watching(self._members, lambda p, note: p.register_post_accumulate_grad_hook(note)):  # type: ignore[no-untyped-call]
            yield
        self._events = [marks.last(bucket) for bucket in range(len(self._flats))]

    def take_events(self) -> list[torch.cuda.Event]:
        """Return the moments of the backward that is being recorded, for ``add_up``."""
        events, self._events = self._events, []
        return events

    def add_up(self, events: Sequence[torch.cuda.Event]) -> None:
        """Add up the gradients of a backward that was launched; at the end the current stream waits for the sums."""
        waits = []
        with queueing_on(self._device, kept_stream(self._device, "beside backward")):
            for event, flat in zip(events, self._flats):
                torch.cuda.current_stream().wait_event(event)
                waits.append(self._group.all_reduce(flat))
        for wait in waits:
            wait()
