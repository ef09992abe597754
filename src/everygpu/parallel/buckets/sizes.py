"""How large buckets are: each default as it was measured, and what ``bucket_cap_mb`` makes of them."""

import math
from collections.abc import Sequence

from torch import Tensor

from everygpu.errors import OptionError

MIB = 2**20

REPLICA_BYTES = 25 * MIB
"""Parameters on their way to replicas, and gradients back or to other ranks: DistributedDataParallel's default, large
enough for full bandwidth."""

UPDATE_BYTES = 12 * MIB
"""Parameters that one process updates together: large enough for full bandwidth, small enough that the last bucket,
which no backward is left to hide, is soon done."""

NUM_UPDATE_BUCKETS = 48
"""A large model has about this many, which are larger: each costs Python a launch on every device."""


def check_bucket_cap(bucket_cap_mb: float | None, caller: str) -> None:
    """Refuse what is no size with an OptionError."""
    is_number = isinstance(bucket_cap_mb, (int, float)) and not isinstance(bucket_cap_mb, bool)
    if bucket_cap_mb is not None and not (is_number and 0 < bucket_cap_mb < math.inf):
        raise OptionError(
            f"{caller}: bucket_cap_mb must be a finite number of MiB above 0, or None, got {bucket_cap_mb!r}. "
            f"DistributedDataParallel's default is 25."
        )


def replica_bucket_bytes(bucket_cap_mb: float | None) -> int:
    """Return the size at which a bucket of replicas' parameters is closed."""
    return REPLICA_BYTES if bucket_cap_mb is None else _in_bytes(bucket_cap_mb)


def update_bucket_bytes(params: Sequence[Tensor], bucket_cap_mb: float | None, *, over_ranks: bool = False) -> int:
    """Return the size at which a bucket of updated parameters is closed."""
    if bucket_cap_mb is not None:
        return _in_bytes(bucket_cap_mb)
    least = REPLICA_BYTES if over_ranks else UPDATE_BYTES
    return max(least, sum(p.nbytes for p in params) // NUM_UPDATE_BUCKETS)


def _in_bytes(bucket_cap_mb: float) -> int:
    return max(1, int(bucket_cap_mb * MIB))
