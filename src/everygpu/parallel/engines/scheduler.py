"""Whose turn it is: replicas on one device run one after another, and all of them may meet half-way."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from everygpu.errors import ReplicaError
from everygpu.parallel.buckets.copies import Streams

Combine = Callable[[list[Any]], list[Any]]
"""From what each replica brought, in order, to what each takes away."""

_replica_context: ContextVar["tuple[ReplicaScheduler, int] | None"] = ContextVar("everygpu_seat", default=None)


class Cancelled(Exception):  # noqa: N818 - no error: another replica's is
    """A replica did not go on, because another one had failed."""


def barrier(value: Any, combine: Combine) -> Any:
    """Wait until every replica of this forward has come here, and take part in what they make together.

    Args:
        value: What this replica brings.
        combine: Called once, in one of the threads.
    Returns:
        This replica's part of the result; outside a forward on several devices, that of ``combine([value])``.
    Raises:
        ReplicaError: another replica ended without coming here.
    """
    seat = _replica_context.get()
    if seat is None:
        return combine([value])[0]
    turns, index = seat
    return turns.barrier(index, value, combine)


class ReplicaScheduler:
    """Lets replicas on the same device through one after another, in order, and nobody after a failure.

    A replica that waits for the others at a meeting passes its turn on; after the meeting they go on in order.
    So a seeded run on the CPU, where replicas share one generator, gives the same numbers every time.

    Args:
        devices: One per replica.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._changed = threading.Condition()
        self._devices = list(devices)
        self._waiting = {d: [i for i, other in enumerate(devices) if other == d] for d in devices}
        self._ended: set[int] = set()
        self._stopped = False
        self._brought: dict[int, Any] = {}
        self._results: list[Any] = []
        self._num_meetings = 0
        self._streams = Streams(*devices)

    def seat(self, index: int) -> AbstractContextManager[Any]:
        """Let what runs within find its place, for meetings."""
        return _ReplicaContext(self, index) if len(self._devices) > 1 else nullcontext()

    def enter(self, index: int) -> None:
        """Wait for one's turn.

        Raises:
            Cancelled: another replica has failed, and this one has not begun.
        """
        with self._changed:
            self._wait_for_turn(index)

    def leave(self, index: int) -> None:
        """Pass the turn on for good."""
        with self._changed:
            self._ended.add(index)
            self._pass_on(index)

    def stop(self) -> None:
        """Let nobody begin or meet any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def barrier(self, index: int, value: Any, combine: Combine) -> Any:
        """See the function ``barrier``."""
        with self._changed:
            self._brought[index] = value
            meeting = self._num_meetings
            if len(self._brought) < len(self._devices):
                self._pass_on(index)
                while self._num_meetings == meeting:
                    self._check(index)
                    self._changed.wait()
            else:
                self._hold(combine)
            self._wait_for_turn(index)
            return self._results[index]

    def _hold(self, combine: Combine) -> None:
        brought = [self._brought[i] for i in range(len(self._devices))]
        with self._streams.current():
            self._results = combine(brought)
        self._brought = {}
        self._num_meetings += 1
        for device, waiting in self._waiting.items():
            waiting[:] = [i for i, other in enumerate(self._devices) if other == device]
        self._changed.notify_all()

    def _pass_on(self, index: int) -> None:
        waiting = self._waiting[self._devices[index]]
        if index in waiting:
            waiting.remove(index)
        self._changed.notify_all()

    def _wait_for_turn(self, index: int) -> None:
        while not self._stopped and self._waiting[self._devices[index]][0] != index:
            self._changed.wait()
        if self._stopped:
            raise Cancelled

    def _check(self, index: int) -> None:
        if self._stopped:
            raise Cancelled
        if self._ended:
            raise ReplicaError(
                f"forward: replica {index} waits for the others at a synchronised layer, which replica "
                f"{min(self._ended)} ended without reaching. All replicas must take the same way through the model."
            )


class _ReplicaContext:
    """Where in which forward this thread is."""

    def __init__(self, turns: ReplicaScheduler, index: int) -> None:
        self._place = (turns, index)

    def __enter__(self) -> None:
        self._token = _replica_context.set(self._place)

    def __exit__(self, *_: object) -> None:
        _replica_context.reset(self._token)
