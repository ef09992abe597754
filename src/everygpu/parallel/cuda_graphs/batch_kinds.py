"""Which kinds of batches are recorded: those that come again, as many as there is room for."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

NUM_WARM_UPS = 3
"""Eager steps before one with a batch of that kind is recorded: libraries choose their algorithms meanwhile."""

MAX_RECORDINGS = 128
"""Kinds of batches that are kept recorded at a time. They share the memory of a step: each further one has its batch,
its results and what CUDA needs for a graph."""

MIN_FREE = 0.1
"""Part of a GPU's memory that has to be free for a further kind of batch to be recorded."""

MAX_COUNTED = 1000
"""Kinds of batches that are counted at a time: a number among the inputs may make each a kind of its own."""

MAX_REFUSED = 3
"""Kinds of batches that couldn't be recorded, after which no further kind is tried; those that could be stay."""

WINDOW = 100
"""Steps after which it is asked whether their batches were of kinds that had come before."""

MAX_NEW = 0.9
"""Part of them that may be of kinds that hadn't; if more are, recording is given up: hardly any comes again."""

logger = logging.getLogger("everygpu")


class BatchKinds:
    """Counts the batches of each kind that have come and run without a recording."""

    def __init__(self, name: str, devices: Sequence[torch.device]) -> None:
        self._name = name
        self._gpus = [d for d in devices if d.type == "cuda"]
        self._counts: dict[Any, int] = {}
        self._recorded: set[Any] = set()
        self._refused: set[Any] = set()
        self._num_seen = self._num_new = 0  # batches in this window
        self._has_told = False

    def come_again(self, key: Any, *, is_recorded: bool) -> bool:
        """Note a batch's kind; tell whether batches of a kind come again, as far as is known."""
        self._num_seen += 1
        self._num_new += key not in self._counts and not is_recorded
        if self._num_seen < WINDOW:
            return True
        num_new, self._num_seen, self._num_new = self._num_new, 0, 0
        return num_new <= MAX_NEW * WINDOW

    def is_due(self, key: Any, num_recordings: int) -> bool:
        """Count a batch that has no recording; tell whether it is to be recorded now."""
        self._counts[key] = self._counts.pop(key, 0) + 1  # moved to the end, as the last seen
        if len(self._counts) > MAX_COUNTED:
            del self._counts[next(iter(self._counts))]
        return self._counts[key] > NUM_WARM_UPS and key not in self._refused and self._has_room(key, num_recordings)

    @property
    def has_recorded(self) -> bool:
        """Whether batches of some kind could be recorded; the recording may have been dropped, and be made again."""
        return bool(self._recorded)

    def note_recording(self, key: Any) -> None:
        """Note that batches of a kind can be recorded."""
        self._recorded.add(key)

    def refuse(self, key: Any, reason: str) -> None:
        """Note that batches of a kind can't be recorded, though others can."""
        self._recorded.discard(key)
        self._refused.add(key)
        self.tell(reason)

    def forget(self) -> None:
        """Count anew."""
        self._counts.clear()
        self._recorded.clear()
        self._refused.clear()

    def tell(self, reason: str) -> None:
        """Say, once, why batches of some kinds are not recorded, where others are."""
        if not self._has_told:
            self._has_told = True
            logger.warning("%s: batches of some shapes run without CUDA graphs: %s.", self._name, reason)

    def _has_room(self, key: Any, num_recordings: int) -> bool:
        """Tell whether a further kind may be recorded; the first one always may."""
        if key not in self._recorded and len(self._refused) >= MAX_REFUSED:
            return False
        if num_recordings >= MAX_RECORDINGS:
            self.tell(f"{MAX_RECORDINGS} are recorded")
            return False
        if num_recordings and any(free < MIN_FREE * total for free, total in map(torch.cuda.mem_get_info, self._gpus)):
            self.tell(f"less than {MIN_FREE:.0%} of a GPU's memory is free")
            return False
        return True
