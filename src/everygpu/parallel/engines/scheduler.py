"""Serialise replicas that share a device, and let all replicas of a forward wait for each other at a barrier."""

import functools
import logging
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from everygpu.comm.streams import Streams
from everygpu.devices.seed import OwnRandom
from everygpu.errors import ReplicaError
from everygpu.progress import running
from everygpu.torch_private.core import NO_BACKWARD, backward_id

logger = logging.getLogger("everygpu")

LONG_TURN_S = 10.0
"""How long the replica whose turn it is may stay at one place before those that wait for theirs say so."""

Combine = Callable[[list[Any]], list[Any]]
"""From the value of each replica, in order, to the result of each."""

_replica_context: ContextVar["tuple[ReplicaScheduler, int] | None"] = ContextVar("everygpu_replica", default=None)

_forward_backward_id: ContextVar[int] = ContextVar("everygpu_forward_backward", default=NO_BACKWARD)
"""The backward within which the present forward has begun: a checkpoint's, or a capture's, may run a whole one."""


def is_recomputing() -> bool:
    """Whether an activation checkpoint runs a part of this replica's forward again, without the others."""
    return backward_id() not in (NO_BACKWARD, _forward_backward_id.get())


def is_in_replica() -> bool:
    """Whether a replica makes the present call, concurrently with others."""
    return _replica_context.get() is not None


class Cancelled(Exception):  # noqa: N818 - no error: another replica's is
    """A replica did not continue, because another one had failed."""


def barrier(value: Any, combine: Combine) -> Any:
    """Wait until every replica of this forward has called this, combine their values, once, and return this one's part.

    Outside a forward on several devices the only value is this one. Raises a ReplicaError where another replica has
    ended without reaching the barrier.
    """
    context = _replica_context.get()
    if context is None:
        return combine([value])[0]
    scheduler, index = context
    with running("barrier", replica=index, waits_for="replicas"):
        return scheduler.barrier(index, value, combine)


class ReplicaScheduler:
    """Runs replicas on the same device one after another, in order, and cancels the remaining ones after a failure.

    A replica that waits at a barrier lets the next one run; after the barrier they continue in order.
    So a seeded run on the CPU, where replicas share one generator, gives the same numbers every time. ``in_order`` has
    replicas on different devices also run one after another; ``at_once`` runs all concurrently. ``random`` gives each
    replica that runs in order its own random numbers.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        *,
        in_order: bool = False,
        at_once: bool = False,
        random: OwnRandom | None = None,
    ) -> None:
        self._random = random
        self._drawing: set[int] = set()
        """Replicas whose numbers are drawn: one, or none between turns."""
        self._changed = threading.Condition()
        positions = range(len(devices))
        self._lines: list[Hashable] = [0] * len(devices) if in_order else list(positions if at_once else devices)
        self._threads: dict[int, int] = {}
        """Of the replicas that have begun."""
        self._waiting = {line: self._members(line) for line in self._lines}
        self._ended: set[int] = set()
        self._stopped = False
        self._values: dict[int, Any] = {}
        self._results: list[Any] = []
        self._num_barriers = 0
        self._streams = Streams(*devices)

    @contextmanager
    def turn(self, index: int) -> Iterator[None]:
        """Run a replica within, once those before it on its device have ended or wait at a barrier; an exception stops
        the others; replicas that have not begun raise ``Cancelled``.
        """
        try:
            with self._changed:
                self._wait_for_turn(index)
                self._threads[index] = threading.get_ident()
            if len(self._lines) == 1:
                yield
                return
            # ``barrier`` finds this replica in what runs within, which is a whole forward.
            tokens = _replica_context.set((self, index)), _forward_backward_id.set(backward_id())
            try:
                with self._own_numbers(index):
                    yield
            finally:
                _replica_context.reset(tokens[0])
                _forward_backward_id.reset(tokens[1])
        except BaseException:
            self.stop()
            raise
        finally:
            with self._changed:
                self._ended.add(index)
                self._pass_on(index)

    @contextmanager
    def _own_numbers(self, index: int) -> Iterator[None]:
        self._begin_drawing(index)
        try:
            yield
        finally:
            self._end_drawing(index)

    def _begin_drawing(self, index: int) -> None:
        if self._random is not None:
            self._random.enter(index)
            self._drawing.add(index)

    def _end_drawing(self, index: int) -> None:
        if self._random is not None and index in self._drawing:  # or it was stopped at a barrier
            self._random.leave(index)
            self._drawing.remove(index)

    def stop(self) -> None:
        """Cancel the replicas that have not begun, or wait at a barrier."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def barrier(self, index: int, value: Any, combine: Combine) -> Any:
        """See the function ``barrier``."""
        with self._changed:
            self._end_drawing(index)
            self._values[index] = value
            passed = self._num_barriers
            if len(self._values) < len(self._lines):
                self._pass_on(index)
                while self._num_barriers == passed:
                    self._check(index)
                    self._changed.wait()
            else:
                self._combine(combine)
            self._wait_for_turn(index)
            self._begin_drawing(index)
            return self._results[index]

    def _combine(self, combine: Combine) -> None:
        values = [self._values[i] for i in range(len(self._lines))]
        with self._streams.current():
            self._results = combine(values)
        self._values = {}
        self._num_barriers += 1
        for line, waiting in self._waiting.items():
            waiting[:] = self._members(line)
        self._changed.notify_all()

    def _members(self, line: Hashable) -> list[int]:
        """List the replicas that run one after another."""
        return [i for i, other in enumerate(self._lines) if other == line]

    def _pass_on(self, index: int) -> None:
        waiting = self._waiting[self._lines[index]]
        if index in waiting:
            waiting.remove(index)
        self._changed.notify_all()

    def _wait_for_turn(self, index: int) -> None:
        before = None
        while not self._stopped and (first := self._waiting[self._lines[index]][0]) != index:
            if not self._changed.wait(LONG_TURN_S):
                place = _place_of(self._threads.get(first))
                if place is not None and place == before:
                    _warn_of_long_turn(index, first, place[0])
                before = place
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


Place = tuple[str, int, str]
"""File, line and function."""


def _place_of(ident: int | None) -> tuple[Place, int] | None:
    """Return where a thread is, and at which instruction, outside of Python's own code that waits for other threads."""
    frame = None if ident is None else sys._current_frames().get(ident)
    while frame is not None and frame.f_globals.get("__name__") in ("threading", "queue"):
        frame = frame.f_back
    return frame and ((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name), frame.f_lasti)


@functools.cache
def _warn_of_long_turn(index: int, running: int, place: Place) -> None:
    logger.warning(
        "forward: replica %d waits for its turn, as replicas on one device run one after another, and replica %d stays "
        "at %s:%d, in %s. If it waits for the others there, they wait for ever: use everygpu.SyncBatchNorm in place of "
        "a batch normalisation that synchronises replicas by itself, or override replicate, as "
        "patch_replication_callback does, by which replicas run at once.",
        index, running, *place,
    )  # fmt: skip
