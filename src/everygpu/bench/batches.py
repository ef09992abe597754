"""Several batches of a model, instead of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Batches:
    """Mark several batches that training steps cycle through, in their order.

    A plain list can't say so: it is one batch already, as a DataLoader collates pairs, the model's input and then the
    targets, and a list of two pairs would be both. Return it fourth::

        from everygpu.bench import Batches

        def bench():
            return model, loss, optimizer, Batches(list(itertools.islice(loader, 40)))

    Args:
        items: Each as ``Training.batch`` says; their shapes and numbers of rows may differ.
    """

    items: Sequence[Any]


def list_batches(batch: Any) -> list[Any]:
    """Return all batches: those of ``Batches``, or the only one."""
    return list(batch.items) if isinstance(batch, Batches) else [batch]
