"""Refuse values that hold themselves or are nested beyond reason: later walks over them would not end."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from everygpu.checkpoint.foreign.faults import broken

_MAX_DEPTH = 100
_MAX_VALUES = 5_000_000
"""Counted where they appear: a short file can name one list so often that it unfolds to billions."""


def check_bounds(value: Any, path: Path) -> None:
    """See that a value which a file describes is of a size that can be walked over.

    Args:
        value: Of plain containers.
        path: The file to name in the error.
    Raises:
        CheckpointDamagedError: it is nested more than a hundred deep, or unfolds to more than five million values.
    """
    num_values = 0
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            inner.extend(_children(item))
            if num_values + len(inner) > _MAX_VALUES:
                raise broken(path, f"unfolds to more than {_MAX_VALUES} values")
        if not inner:
            return
        num_values += len(inner)
        level = inner
    raise broken(path, f"holds itself, or is nested more than {_MAX_DEPTH} deep")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple | set) else ()
