"""Notice the steps of a training script, and have torch's profiler look at some of them."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from everygpu.feed.one_pass import Feed
from everygpu.step.train_step import TrainStep
from everygpu.tracing.events import ENDING, WAITING

_PREPARING = 2  # steps for which the profiler runs already, and keeps nothing: its own start is slow
_LEAST_TIMED, _MOST_TIMED = 3, 10  # steps that are timed without the profiler


@dataclass(kw_only=True)
class StepTracer:
    """Counts steps, and traces some of them.

    A step ends when the first optimizer or ``TrainStep`` that was seen has made another update, or call.

    Args:
        path: Where the trace goes.
        warmup: Steps before the traced ones, at least two.
        num_steps: Steps to trace.
        on_end: Called in the training thread when they are traced.
    """

    path: Path
    warmup: int
    num_steps: int
    on_end: Callable[[], None]
    num_seen: int = 0
    is_done: bool = False
    by_train_step: bool = False
    _stepped: Any = None
    _thread: int = 0
    _profile: Any = None
    _began_s: float = 0.0
    _ended_s: float = 0.0

    @property
    def num_traced(self) -> int:
        """Whole steps in the trace."""
        return min(self.num_steps, max(0, self.num_seen - self.warmup))

    @property
    def untraced_s(self) -> float | None:
        """Mean seconds of the last steps without the profiler; None for fewer than three."""
        begin, end = self._timed
        if end - begin < _LEAST_TIMED or self.num_seen < end:
            return None
        return (self._ended_s - self._began_s) / (end - begin)

    @property
    def _timed(self) -> tuple[int, int]:
        """After how many steps the time without the profiler begins and ends."""
        end = self.warmup - _PREPARING
        return max(1, end - _MOST_TIMED), end

    @property
    def is_left_running(self) -> bool:
        """Whether the profiler runs for another thread than this one, and so can't be ended, nor survives the exit."""
        return self._profile is not None and not self.is_done and threading.get_ident() != self._thread

    def notice(self, stepped: object) -> None:
        """Count a step of the first object that has stepped, in its thread."""
        if self._stepped is None:
            self._stepped, self._thread = stepped, threading.get_ident()
            self.by_train_step = isinstance(stepped, TrainStep)
        if self.is_done or stepped is not self._stepped or threading.get_ident() != self._thread:
            return
        self.num_seen += 1
        self._measure()
        if self._profile is None:
            self._profile = self._start()
        else:
            self._profile.step()
        if self.num_seen == self.warmup + self.num_steps:
            self.finish()
            self.on_end()

    def _measure(self) -> None:
        """Wait for the devices where a measurement begins or ends, so that it has all that its steps queue."""
        begin, end = self._timed
        if self.num_seen in (begin, end, self.warmup, self.warmup + self.num_steps):
            _synchronize()
        if self.num_seen == begin:
            self._began_s = time.perf_counter()
        if self.num_seen == end:
            self._ended_s = time.perf_counter()

    def finish(self) -> None:
        """End the trace where it is; called again, or by another thread than the training's, it does nothing."""
        if self._profile is not None and not self.is_done and not self.is_left_running:
            self.is_done = True
            self._profile.stop()

    def _start(self) -> Any:
        preparing = min(_PREPARING, self.warmup - 1)
        plan = schedule(wait=self.warmup - 1 - preparing, warmup=preparing, active=self.num_steps, repeat=1)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # acc_events: without it torch warns that each cycle drops the events of the one before; there is one.
        found = profile(activities=activities, schedule=plan, on_trace_ready=self._export, acc_events=True)
        found.start()
        return found

    def _export(self, found: Any) -> None:
        found.export_chrome_trace(str(self.path))


@contextmanager
def noticing(tracer: StepTracer) -> Iterator[None]:
    """Tell a tracer of updates of optimizers and calls of ``TrainStep``, and mark where a ``Feeder`` is waited for."""
    train, take = TrainStep.__call__, Feed.__next__
    inside = threading.local()  # a TrainStep's own optimizer doesn't count

    @functools.wraps(train)
    def trained(step: Any, *args: Any, **kwargs: Any) -> Any:
        inside.is_training = True
        try:
            loss = train(step, *args, **kwargs)
        finally:
            inside.is_training = False
        tracer.notice(step)
        return loss

    @functools.wraps(take)
    def taken(feed: Any) -> Any:
        with record_function(WAITING):
            return take(feed)

    def updated(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not getattr(inside, "is_training", False):
            tracer.notice(optimizer)

    handle = register_optimizer_step_post_hook(updated)
    TrainStep.__call__, Feed.__next__ = trained, taken  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        TrainStep.__call__, Feed.__next__ = train, take  # type: ignore[method-assign]
        handle.remove()


def _synchronize() -> None:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return
    with record_function(ENDING):
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):  # one that isn't used would be given a context
                torch.cuda.synchronize(index)
