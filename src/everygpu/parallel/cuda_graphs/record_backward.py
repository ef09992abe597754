"""A backward while it is recorded: each bundle's additions run beside what is left of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from everygpu.parallel.buckets.bucket import Grads
from everygpu.parallel.cuda_graphs.launch import Leaves, find_grads
from everygpu.parallel.cuda_graphs.ready_events import ReadyEvents
from everygpu.parallel.cuda_graphs.transfer.backends import GradReducer


def go_backward(
    outputs: list[Tensor],
    seeds: Sequence[Tensor],
    leaves: Leaves,
    sums: Sequence[GradReducer],
    devices: Sequence[torch.device],
) -> list[list[Grads]]:
    """Go backward and add the gradients up; called by what records it.

    Args:
        outputs: Where backward begins.
        seeds: Their gradients.
        leaves: What gradients are taken of.
        sums: What adds them up, for each bundle.
        devices: One per replica.
    Returns:
        The gradients, for each bundle and device.
    """
    events = ReadyEvents(devices)
    with _noted(events, leaves):
        grads = find_grads(outputs, seeds, leaves)
    for b, (total, row) in enumerate(zip(sums, grads)):
        for replica in total.take(row):
            events.forget(b, replica)
    events.run_beside({b: total.run for b, total in enumerate(sums)})
    return grads


@contextmanager
def _noted(events: ReadyEvents, leaves: Leaves) -> Iterator[None]:
    """Note when each replica has all gradients of a bundle, in a backward within."""
    handles = []
    for b, row in enumerate(leaves):
        for j, tensors in enumerate(row):
            note = events.counter(b, j, tensors)
            handles += [t.register_hook(lambda _, t=t, note=note: note(t)) for t in tensors]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
