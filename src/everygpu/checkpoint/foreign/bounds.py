"""Refuse values that hold themselves, are nested beyond reason, or are far larger than their file."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from everygpu.checkpoint.foreign.faults import broken

_MAX_DEPTH = 100
_MAX_VALUES = 5_000_000
"""Counted where they appear: a short file can name one list so often that it unfolds to billions."""

_MAX_UNFOLDING = 64
_ALWAYS_BYTES = 64 * 2**20


def max_unfolded_bytes(size_bytes: int) -> int:
    """Tell how many bytes the tensors of a file may have, all together and each counted under every name.

    More than the file, as tied weights have several names, a buffer may be one number expanded, and the file may
    be compressed. Without a bound, a file of a kilobyte gives a tensor of terabytes, which is an error only
    when it is copied.

    Args:
        size_bytes: Of the file.
    """
    return max(_ALWAYS_BYTES, _MAX_UNFOLDING * size_bytes)


def check_bounds(value: Any, path: Path, size_bytes: int) -> None:
    """See that a value which a file describes is of a size that can be walked over and copied.

    Args:
        value: Of plain containers and tensors.
        path: The file to name in the error.
        size_bytes: Its size, or that of all files that the value is from.
    Raises:
        CheckpointDamagedError: it is nested more than a hundred deep, or unfolds to more than five million values, or
            to more bytes than `max_unfolded_bytes`.
    """
    num_values = num_bytes = 0
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            inner.extend(_children(item))
            num_bytes += _num_bytes(item)
            if num_values + len(inner) > _MAX_VALUES:
                raise broken(path, f"unfolds to more than {_MAX_VALUES} values")
        if num_bytes > max_unfolded_bytes(size_bytes):
            raise broken(path, f"has {size_bytes} bytes and unfolds to tensors of {num_bytes} bytes")
        if not inner:
            return
        num_values += len(inner)
        level = inner
    raise broken(path, f"holds itself, or is nested more than {_MAX_DEPTH} deep")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        keys = [key for key in value if isinstance(key, tuple | frozenset)]
        return [*value.values(), *keys, *getattr(value, "__dict__", {}).values()]  # a state dict's versions
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def _num_bytes(value: Any) -> int:
    """Count what a tensor takes as an ordinary one, in memory of its own; on the meta device it takes none."""
    return value.numel() * value.element_size() if isinstance(value, Tensor) and not value.is_meta else 0
