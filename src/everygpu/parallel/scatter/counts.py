"""What is known of a call's rows: how many each replica has, and how much its results count."""

from collections.abc import Mapping, Sequence
from typing import Any

from everygpu.parallel.scatter.scatter import Shard


class ScatteredArgs(tuple[Any, ...]):
    """One entry of arguments per replica, and what is known of them."""

    positions: tuple[int, ...]
    """Of the replicas, in the order of ``device_ids``."""
    rows: tuple[int, ...]
    """Of the batch, per replica."""
    weights: tuple[int, ...]
    """How much a result for all of them counts, per replica."""
    counted: tuple[int, ...]
    """The rows, where the call has any."""


class ReplicaOutputs(list[Any]):
    """What each replica returned, and what it is joined by."""

    rows: tuple[int, ...] | None = None
    """Of the batch, per replica; None where they are unknown, and so for the next two."""
    weights: tuple[int, ...] | None = None
    """How much each result counts."""
    counted: tuple[int, ...] | None = None
    """The rows, where the call has any."""
    joins: Mapping[str, Any] = {}
    """Further options of the ``Joiner``."""

    def follow(self, args: ScatteredArgs | None) -> None:
        """Take over what is known of the arguments."""
        if args is None:
            self.rows = self.weights = self.counted = None
        else:
            self.rows, self.weights, self.counted = args.rows, args.weights, args.counted


def rows_of(shards: Sequence[Shard]) -> tuple[int, ...]:
    """Return the rows behind each replica's output; 1 where the call has none."""
    return tuple(1 if s.rows is None else s.rows for s in shards)


def weights_of(shards: Sequence[Shard]) -> tuple[int, ...]:
    """Return how much each replica's results count."""
    return tuple(s.weight for s in shards)


def counted_rows(shards: Sequence[Shard]) -> tuple[int, ...]:
    """Return the rows behind each replica's output; none where the call has none."""
    return tuple(s.rows for s in shards if s.rows is not None)
