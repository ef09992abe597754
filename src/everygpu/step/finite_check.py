"""Updates whose loss or gradients are not finite: noted on the device, reported by the host some updates later."""

import logging
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from everygpu import comm
from everygpu.errors import NonFiniteError
from everygpu.parallel.replicas.module_tree import modules_of
from everygpu.torch_private.core import NormBase, foreach_copy_

logger = logging.getLogger("everygpu")

RULES = ("skip", "raise", "ignore")
LAG = 8
"""Updates that may be queued after one before the host reads its status: so it hardly ever waits for the device."""
MAX_IN_ROW = 10
"""As many updates left out one after another raise."""


class UpdateStatus(float, Enum):
    """What became of an update, as devices write it; nan for one that was skipped because of what isn't finite."""

    APPLIED = 1.0
    SCALE_TOO_LARGE = 2.0
    """Skipped: under float16's loss scale a gradient has overflowed."""
    PARTLY_APPLIED = 3.0
    """Applied but to buckets with gradients that aren't finite."""


class _Update(NamedTuple):
    number: int
    status: Tensor
    """On the host, once the event has come."""
    event: "torch.cuda.Event | None"


class FiniteCheck:
    """Reads the status of each update, shape ()."""

    def __init__(self, home: torch.device, *, rule: str) -> None:
        self.is_on = rule != "ignore"
        self.is_whole = rule == "raise"
        """Whether updates are to wait for all gradients. Waiting exposes the whole update, 6% of a BERT's step: under
        "skip" it begins with the first update that has cost a part of its values."""
        self.num_skipped = 0
        self._raises = rule == "raise"
        self._lag = LAG if home.type == "cuda" else 0
        # Not where a default device would have it.
        self._rows = torch.zeros(self._lag + 1, device="cpu", pin_memory=home.type == "cuda")
        self._queued: deque[_Update] = deque()
        self._num_in_row = 0
        self._error: NonFiniteError | None = None

    def submit(self, number: int, status: Tensor) -> None:
        """Queue the status of an update to be read."""
        row = self._rows[number % len(self._rows)]
        row.copy_(status, non_blocking=True)
        event = torch.cuda.current_stream(status.device).record_event() if status.device.type == "cuda" else None
        self._queued.append(_Update(number, row, event))

    def restart(self, num_skipped: int) -> None:
        """Go on from a state that was saved."""
        self._queued.clear()
        self._error, self._num_in_row, self.num_skipped = None, 0, num_skipped

    def look(self) -> None:
        """Read what is due.

        Raises:
            NonFiniteError: an update was left out, where that raises; else so many were, one after another.
        """
        # Once one was found the next are waited for: ten in a row raise.
        self._read(0 if self._num_in_row else self._lag)
        error, self._error = self._error, None
        if error is not None:
            if self._raises:
                self.wait()  # whoever catches it finds no update counted that was left out; the next call raises those
            raise error

    def wait(self) -> None:
        """Read all queued statuses; ``look`` raises their errors."""
        self._read(0)

    def _read(self, lag: int) -> None:
        while len(self._queued) > lag:
            update = self._queued.popleft()
            if update.event is not None:
                update.event.synchronize()
            self._judge(update)

    def _judge(self, update: _Update) -> None:
        value = update.status.item()
        if value == UpdateStatus.APPLIED:
            self._num_in_row = 0
            return
        self.num_skipped += 1
        if value != UpdateStatus.SCALE_TOO_LARGE:
            self._note_left_out(update.number, is_partial=value == UpdateStatus.PARTLY_APPLIED)

    def _note_left_out(self, number: int, *, is_partial: bool) -> None:
        self._num_in_row += 1
        if is_partial:
            self.is_whole = True
        is_last = self._num_in_row >= MAX_IN_ROW
        if not (self._raises or is_last or self._num_in_row == 1):
            return
        message = (
            f"TrainStep: the loss and all gradients must be finite, got others in update {number}. "
            f"{_PARTLY if is_partial else _LEFT_OUT} {_ADVICE}"
        )
        if self._raises:
            self._error = self._error or NonFiniteError(message)
        elif is_last:
            self._error = NonFiniteError(f"{message} It was update {self._num_in_row} in a row.")
        else:
            logger.warning("%s", message)


_LEFT_OUT = "The update is left out: parameters and optimizer are as before."
_PARTLY = (
    "It was captured beside backward, and the loss was finite: only buckets with such gradients are as before. "
    "From now on updates wait for all gradients, and are left out as a whole."
)
_ADVICE = (
    "Look at this batch, whose mean is nan if it has 0 rows, and at the learning rate; "
    "torch.autograd.set_detect_anomaly(True) finds the operation."
)


Kept = list[tuple[list[Tensor], Tensor]]
"""Statistics of one dtype and device, and side by side their values before a forward."""


@torch.no_grad()
def keep_statistics(roots: Iterable[nn.Module], devices: Collection[torch.device]) -> Kept:
    """Copy the statistics of layers in training mode, on the devices: elsewhere something would wait for the loss."""
    layers = [m for m in modules_of(roots) if isinstance(m, NormBase) and m.training]
    found = {id(t): t for m in layers for t in (m.running_mean, m.running_var) if t is not None}
    groups = defaultdict(list)
    for t in found.values():
        if t.device in devices:
            groups[t.dtype, t.device].append(t)
    return [(tensors, torch.cat(tensors)) for tensors in groups.values()]


@torch.no_grad()
def put_back_unless_finite(kept: Kept, loss: Tensor) -> None:
    """Put all back where a loss, of shape (), isn't finite; without waiting for it."""
    for tensors, before in kept:
        is_finite = comm.copy(loss.detach(), before.device) * 0 == 0  # isfinite launches twice as many kernels
        torch.where(is_finite, torch.cat(tensors), before, out=before)
        # Through .data, as batch_norm itself does: the version stays, so backward accepts what forward saved.
        foreach_copy_([t.data for t in tensors], torch.split(before, [t.numel() for t in tensors]))
