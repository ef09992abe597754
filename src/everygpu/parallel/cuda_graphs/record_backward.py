"""A backward while it is recorded: each bundle's additions run beside what is left of it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from everygpu.parallel.buckets.memory import Grads
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
    with events.watching(leaves, _on_gradient):
        grads = find_grads(outputs, seeds, leaves)
    for b, (total, row) in enumerate(zip(sums, grads)):
        for replica in total.take(row):
            events.forget(b, replica)
    events.run_beside({b: total.run for b, total in enumerate(sums)})
    return grads


def _on_gradient(t: Tensor, note: Callable[[Tensor], None]) -> RemovableHandle:
    return t.register_hook(lambda _: note(t))  # type: ignore[no-any-return, no-untyped-call]
