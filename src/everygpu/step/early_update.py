"""Updates that begin while backward goes on."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from everygpu.parallel.thread_state import queueing_on
from everygpu.step.arena import Arena
from everygpu.step.fused import FusedUpdate, Rows


@functools.cache
def update_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that updates are queued on beside the backward, the same every time."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class EarlyUpdate:
    """Updates each bucket when all devices have its gradients, beside what is left of the backward; when recording.

    A recording knows dependencies, not the order of calls: the kernels are queued after the backward, and depend on
    the moments in it that were marked.

    Args:
        arena: Parameters and gradients, on CUDA devices.
        fused: Their update.
        rows: What ``FusedUpdate.prepare`` returned.
    """

    def __init__(self, arena: Arena, fused: FusedUpdate, rows: Rows) -> None:
        self._arena = arena
        self._fused = fused
        self._rows = rows
        self._ready: dict[tuple[int, int], torch.cuda.Event] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark, during a backward within, when each device has all gradients of a bucket.

        Raises:
            RuntimeError: torch's, in backward, where a parameter is needed after its gradient is complete.
        """
        handles = []
        for b, plan in enumerate(self._arena.plans):
            members = [slot.index for slot in plan.slots if slot.index in self._rows.row_of]
            for j, tensors in enumerate([self._arena.params, *self._arena.twins]):
                note = self._counter(b, j, len(members))
                handles += [_on_accumulation(tensors[i], note) for i in members]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def launch(self) -> None:
        """Queue the kernels, and have the devices' current streams wait for them."""
        devices = self._arena.devices
        streams = [update_stream(d) for d in devices]
        now = [torch.cuda.current_stream(d).record_event() for d in devices]
        for stream in streams:
            stream.wait_event(now[0])
        for b, plan in enumerate(self._arena.plans):
            if not any(slot.index in self._rows.row_of for slot in plan.slots):
                continue
            ready = [self._ready.get((b, j), now[j]) for j in range(len(devices))]
            for me, (d, stream) in enumerate(zip(devices, streams)):
                for event in ready:
                    stream.wait_event(event)
                with queueing_on(d, stream):
                    self._fused.launch_bucket(b, me, self._rows, factor=1.0, is_reduced=False)
        for d in devices:
            for stream in streams:
                torch.cuda.current_stream(d).wait_stream(stream)

    def _counter(self, bucket: int, replica: int, num_members: int) -> Callable[[Tensor], Any]:
        left = [num_members]

        def note(t: Tensor) -> None:
            # From here on its value is not the one that forward saw: torch refuses to use it in backward.
            increment_version(t)
            left[0] -= 1
            if left[0] == 0:
                self._ready[bucket, replica] = torch.cuda.current_stream(t.device).record_event()

        return note


def _on_accumulation(t: Tensor, call: Callable[[Tensor], Any]) -> Any:
    return t.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
