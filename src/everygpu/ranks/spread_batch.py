"""The batch of a forward that runs on several ranks, as its layers see it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor

from everygpu.ranks.group import Group


class SpreadBatch(NamedTuple):
    """A batch of which each rank has some rows."""

    group: Group
    weight: float | Tensor
    """What this rank's gradients will be multiplied by, beside other ranks'."""


_batch: ContextVar[SpreadBatch | None] = ContextVar("everygpu_spread_batch", default=None)


@contextmanager
def forward_of(batch: SpreadBatch) -> Iterator[None]:
    """Have layers within compute over the whole batch."""
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


def batch_of_forward() -> SpreadBatch | None:
    """Return what a layer computes over; None where its rows are all there are."""
    return _batch.get()
