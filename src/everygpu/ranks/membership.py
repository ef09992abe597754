"""Which process this is, of those that train together."""

import os
from typing import NamedTuple

import torch.distributed as dist

from everygpu.errors import RankError


class Membership(NamedTuple):
    """A process's place among those that train together."""

    rank: int
    """0 to ``size`` - 1."""
    size: int
    """Processes on all machines."""
    local_rank: int
    """Among the processes of this machine."""
    local_size: int
    """Processes on this machine."""


def find_membership() -> Membership | None:
    """Return this process's place; None where it trains alone.

    Its process group says so, if it has one, else the environment that torchrun sets: no group is made.

    Raises:
        RankError: the environment has something else than numbers.
    Source:
        ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` as ``torchrun`` documents them.
    """
    has_group = dist.is_available() and dist.is_initialized()
    if not has_group and "RANK" not in os.environ:
        return None
    size = dist.get_world_size() if has_group else _number("WORLD_SIZE", 1)
    if size == 1:
        return None
    rank = dist.get_rank() if has_group else _number("RANK", 0)
    return Membership(rank, size, _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", size))


def is_main() -> bool:
    """Whether this process is the one that prints and writes: rank 0, or the only one::

        if everygpu.is_main():
            print("epoch 3 begins")

    Saving needs no such line: ``save`` and ``CheckpointManager`` write once by themselves.

    Raises:
        RankError: the environment has something else than numbers.
    """
    found = find_membership()
    return found is None or found.rank == 0


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return otherwise
    if not text.isdecimal():
        raise RankError(
            f"ranks: {name} must be a whole number where RANK is set, got {text!r}. Start the script by torchrun, "
            f"which sets it, or unset RANK."
        )
    return int(text)
