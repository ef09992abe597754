"""Which batches are worth a capture: by how often batches of their shapes have come."""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

NUM_WARM_UPS = 3
"""Eager steps before the first capture: libraries choose their algorithms meanwhile. Further kinds are captured when
their second batch comes."""

MAX_CAPTURES = 128
"""Captures that are kept at a time. They share the memory of a step: each further one has its batch, its results and
what CUDA needs for a graph."""

MIN_FREE = 0.1
"""Part of a GPU's memory that has to be free for a further capture."""

MAX_COUNTED = 1000
"""Kinds of batches that are counted at a time: a number among the inputs may make each a kind of its own."""

MAX_REFUSED = 3
"""Kinds that couldn't be captured, after which no further kind is tried; those that could be stay."""

WINDOW = 100
"""Steps after which it is asked whether their batches were of kinds that had come before."""

MAX_NEW = 0.9
"""Part of them that may be of kinds that hadn't; if more are, no more is captured: hardly any comes again."""

LONG_WINDOW = 1000
"""Number of steps; unless most of them are replayed, a log line says how many kinds of batches came."""

_PAD = "Pad batches to fewer lengths: pad_to_multiple_of=64 in transformers' collators"

logger = logging.getLogger("everygpu")


class BatchKinds:
    """Counts batches by kind, which is their shapes and all else that a capture depends on.

    Without memory for another capture, the least recently used one is dropped, once batches of
    another have come ``NUM_WARM_UPS`` times since.
    """

    def __init__(self, name: str, devices: Sequence[torch.device]) -> None:
        self._name = name
        self._gpus = [d for d in devices if d.type == "cuda"]
        self._step = 0
        self._times: dict[Any, deque[int]] = {}
        """Of kinds without a capture, the steps at which their last batches came."""
        self._captured: dict[Any, int] = {}
        """When the last batch of each kind that has a capture came, the longest ago first."""
        self._could: dict[Any, bool] = {}
        """Of kinds that a capture was tried of, whether there could be one."""
        self._num_seen = self._num_new = self._num_eager = self._num_noted = 0
        self._has_reported = False

    def come_again(self, key: Any) -> bool:
        """Note a batch's kind; return whether batches of a kind come again, as far as known."""
        self._step += 1
        self._num_seen += 1
        self._num_new += key not in self._times and key not in self._captured
        self._num_eager += key not in self._captured
        if self._step % LONG_WINDOW == 0:
            num, self._num_eager = self._num_eager, 0
            if self.has_captured and num > LONG_WINDOW // 2:
                self.report(f"{num} of {LONG_WINDOW:,}, of {len(self._times) + len(self._captured)} shapes. {_PAD}")
        if self._num_seen < WINDOW:
            return True
        num_new, self._num_seen, self._num_new = self._num_new, 0, 0
        return num_new <= MAX_NEW * WINDOW

    def is_due(self, key: Any) -> bool:
        """Count a batch without a capture; return whether to capture it now."""
        times = self._times.pop(key, None) or deque[int](maxlen=NUM_WARM_UPS + 1)
        self._times[key] = times  # moved to the end, as the last seen
        times.append(self._step)
        if len(self._times) > MAX_COUNTED:
            del self._times[next(iter(self._times))]
        return len(times) > self._num_eager_steps() and self._could.get(key, True) and self._has_memory(key)

    def is_to_be_noted(self, key: Any) -> bool:
        """Return, once for a kind, whether to look at what its steps run; at first they have run once by then."""
        is_time = len(self._times[key]) == max(1, self._num_eager_steps() - 1) and self._num_noted < MAX_COUNTED
        self._num_noted += is_time
        return is_time

    @property
    def has_captured(self) -> bool:
        """Whether batches of some kind could be captured; that may have been dropped, and be made again."""
        return any(self._could.values())

    def kind_to_evict(self) -> Any:
        """Return the kind whose capture to drop before another one is made; None if memory suffices."""
        if not self._captured or self._why_full() is None:
            return None
        oldest = next(iter(self._captured))
        del self._captured[oldest]
        return oldest

    def note_use(self, key: Any) -> None:
        """Note that a kind has a capture, and that a batch of it came."""
        self._captured.pop(key, None)
        self._captured[key] = self._step
        self._could[key] = True
        self._times.pop(key, None)

    def refuse(self, key: Any, reason: str) -> None:
        """Note that batches of a kind can't be captured, though others can."""
        self._could[key] = False
        self.report(f"{reason}.")

    def forget(self) -> None:
        """Restart counting."""
        for counted in (self._times, self._captured, self._could):
            counted.clear()

    def report(self, reason: str) -> None:
        """Say, once, why batches of some kinds are not captured, where others are."""
        if not self._has_reported:
            self._has_reported = True
            logger.warning("%s: batches of some shapes run without CUDA graphs: %s", self._name, reason)

    def _num_eager_steps(self) -> int:
        return 1 if self._captured else NUM_WARM_UPS

    def _has_memory(self, key: Any) -> bool:
        """Whether a further kind may be captured, if need be in place of another; the first one always may."""
        if key not in self._could and list(self._could.values()).count(False) >= MAX_REFUSED:
            return False
        if not self._captured or (reason := self._why_full()) is None:
            return True
        times, last = self._times[key], next(iter(self._captured.values()))
        if len(times) == times.maxlen and times[0] > last:
            return True
        self.report(f"{reason}. {_PAD}")
        return False

    def _why_full(self) -> str | None:
        if len(self._captured) >= MAX_CAPTURES:
            return f"there are graphs of {MAX_CAPTURES} others"
        is_low = any(free < MIN_FREE * total for free, total in map(torch.cuda.mem_get_info, self._gpus))
        return f"less than {MIN_FREE:.0%} of a GPU's memory is free" if is_low else None
