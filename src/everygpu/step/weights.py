"""How much each batch counts in an update: by its rows, or what the user counts, on all ranks."""

import functools
from typing import Any

import torch
from torch import Tensor

from everygpu import comm
from everygpu.parallel.cuda_graphs.static_batch import Batch
from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.scatter.batch_weight import Weight, weigh_batch


class BatchWeights:
    """Makes an update's gradient the mean over all rows of its batches, not a mean of their means."""

    def __init__(self, weight: Weight | None, model: DataParallel, loss: Any) -> None:
        self._group = None if model.rank_model is None else model.rank_model.group
        self._home = model.replica_devices[0]
        self._weigh = functools.partial(
            weigh_batch, weight, "TrainStep", module=model.module, loss=loss, dim=model.dim,
            num_devices=len(model.device_ids),
        )  # fmt: skip
        self._accumulate = 1
        self._is_needed = False
        self._unit: float | None = None  # gradients stay in the range that they have with one batch
        self._share = torch.ones((), dtype=torch.float32, device=self._home)
        self._written = 1.0
        self._here: float | Tensor = 1.0
        self._all: float | Tensor = 1.0
        self._total: float | Tensor = 0.0

    def begin(self, batch: Batch, accumulate: int) -> None:
        """Count a batch of an update of so many; a recording finds the share where the one before was."""
        self._accumulate = accumulate
        self._is_needed = accumulate > 1 or self._group is not None
        if not self._is_needed:
            return
        if self._group is not None:
            self._group.first_batch.compare(self._group, batch)
        self._here = here = self._count(batch)
        if self._group is None:
            self._all = here
        if self._unit is None:
            self._unit = self._find_unit(here)
        share = here / self._unit
        if isinstance(share, Tensor):
            self._share.copy_(share)
            self._written = float("nan")
        elif share != self._written:
            self._share.fill_(share)
            self._written = share

    def seed(self, loss: Tensor) -> Tensor:
        """Return the loss's own gradient, with which backward begins; 0 for a batch without rows, whose mean is nan."""
        if not self._is_needed:
            return torch.ones_like(loss)
        return comm.copy(self._share, loss.device) / self._accumulate  # hooks may write to it

    def end(self) -> None:
        """Count the batch as one of the update."""
        self._total = self._total + self._all

    def mean(self, loss: Tensor, flags: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the loss over all ranks' rows of the batch that was begun, and the sum of flags that travel along."""
        if self._group is None:
            return loss, flags
        dtype, here = torch.promote_types(loss.dtype, torch.float32), self._here
        if isinstance(here, Tensor):
            numbers = here.to(loss.device, dtype).repeat(2)
        else:  # no copy from the host, which waits for what is queued there
            numbers = torch.full((2,), here, dtype=dtype, device=loss.device)
        found = loss.detach()
        if isinstance(here, Tensor) or here == 0:  # a mean over no rows is nan
            found = torch.where(numbers[1] == 0, 0, found)
        numbers[0].mul_(found)
        numbers = numbers if flags is None else torch.cat([numbers, flags.to(dtype)])
        self._group.all_reduce(numbers)()
        self._all = numbers[1].to(self._home, torch.float32)
        return (numbers[0] / numbers[1]).to(loss.dtype), None if flags is None else numbers[2:]

    def leave_out_empty(self, loss: Tensor) -> Tensor:
        """Return what must be finite of a loss: 0 for a batch without rows, whose mean is nan."""
        if not self._is_needed or self._group is not None:
            return loss
        return torch.where(comm.copy(self._share, loss.device) == 0, 0, loss)

    def take_factor(self) -> float | Tensor:
        """Return what the sum of the batches' gradients is multiplied by, and begin with the next update."""
        total, self._total = self._total, 0.0
        if not self._is_needed or self._unit is None:
            return 1.0
        if isinstance(total, float) and total == 0:  # batches without rows only, whose mean is nan
            return float("nan")
        return self._accumulate * self._unit / total

    def drop(self) -> None:
        """Forget the batches of this update."""
        self._total = 0.0

    def _count(self, batch: Batch) -> float | Tensor:
        found = self._weigh(*batch)
        return found.to(self._home, torch.float32) if isinstance(found, Tensor) else found

    def _find_unit(self, here: float | Tensor) -> float:
        found = max(float(here), 1.0)
        return found if self._group is None else self._group.broadcast_object(found)
