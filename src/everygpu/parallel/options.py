"""Which values DataParallel's options may have."""

from typing import Any

from everygpu.errors import OptionError
from everygpu.parallel.buckets.sizes import check_bucket_cap
from everygpu.parallel.engines.table import ENGINES
from everygpu.parallel.scatter.split import check_split

GATHER_RULES = ("sharded", "joined")
BUFFER_RULES = ("first", "mean")


def check_options(
    split: Any, num_devices: int, dim: Any, *, engine: Any, gather: Any, buffers: Any, bucket_cap_mb: Any
) -> None:
    """Refuse values that options don't have.

    Raises:
        OptionError: naming the values that there are.
    """
    if not isinstance(split, str) or split != "auto":
        check_split(split, num_devices)
    if engine == "processes":
        raise OptionError(
            "DataParallel: engine='processes' is no engine any more. Start one process a GPU: everygpu run --processes "
            "auto train.py, or everygpu.launch(...) in a notebook."
        )
    for name, value, values in (
        ("engine", engine, ENGINES),
        ("gather", gather, GATHER_RULES),
        ("buffers", buffers, BUFFER_RULES),
    ):
        if value not in values:
            raise OptionError(f"DataParallel: {name} must be one of {values}, got {value!r}.")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise OptionError(f"DataParallel: dim must be an int, got {dim!r}.")
    check_bucket_cap(bucket_cap_mb, "DataParallel")
