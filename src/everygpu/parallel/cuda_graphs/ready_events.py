"""Work that is recorded beside a backward."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from everygpu.comm.streams import kept_stream, queueing_on_each

Register = Callable[[Tensor, Callable[[Tensor], None]], RemovableHandle]
"""Has a function called with a tensor when its gradient is there."""


class ReadyEvents:
    """The moments of a backward, while it is recorded, at which each replica has all gradients of a group.

    A recording knows dependencies, not the order of calls: work on the groups is queued after the backward, and
    depends on these moments only.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._ready: dict[tuple[int, int], torch.cuda.Event] = {}
        """By group and replica, the last to be ready last."""

    def counter(self, group: int, replica: int, tensors: Iterable[Tensor]) -> Callable[[Tensor], None]:
        """Make what is to be called with each of a replica's tensors of a group when its gradient is there."""
        left = set(map(id, tensors))

        def note(t: Tensor) -> None:
            left.discard(id(t))
            if not left:  # again and again where gradients come bit by bit: the last one counts
                self._ready.pop((group, replica), None)
                self._ready[group, replica] = torch.cuda.current_stream(t.device).record_event()

        return note

    def mark(self, group: int) -> None:
        """Have a group be ready with what is queued on all devices now."""
        for replica, d in enumerate(self._devices):
            self._ready[group, replica] = torch.cuda.current_stream(d).record_event()

    @contextmanager
    def watching(self, groups: Sequence[Sequence[Sequence[Tensor]]], register: Register) -> Iterator[None]:
        """Note the moments of a backward within, for each group and replica the tensors whose gradients count."""
        handles = []
        for g, row in enumerate(groups):
            for j, tensors in enumerate(row):
                note = self.counter(g, j, tensors)
                handles += [register(t, note) for t in tensors]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def forget(self, group: int, replica: int) -> None:
        """Have a group wait for all that is queued for a replica: it is not as it was at the moment."""
        self._ready.pop((group, replica), None)

    def run_beside(self, works: Mapping[int, Callable[[], None]]) -> None:
        """Queue each group's work beside what is left of the backward, and have the current streams wait for it.

        Groups come in the order in which they are ready: one that comes too early holds up those behind it. Each is
        called with the streams current that it is to be queued on.
        """
        streams = [kept_stream(d, "beside backward") for d in self._devices]
        now = [torch.cuda.current_stream(d).record_event() for d in self._devices]
        for group in self._in_order(works):
            for stream in streams:
                for replica, event in enumerate(now):
                    stream.wait_event(self._ready.get((group, replica), event))
            with queueing_on_each(self._devices, streams):
                works[group]()
        for d in self._devices if works else ():  # a stream that has waited for nothing is no part of the recording
            for stream in streams:
                torch.cuda.current_stream(d).wait_stream(stream)

    def _in_order(self, groups: Iterable[int]) -> list[int]:
        places = {key: place for place, key in enumerate(self._ready)}
        replicas = range(len(self._devices))
        return sorted(groups, key=lambda g: max(places.get((g, j), len(places)) for j in replicas))
