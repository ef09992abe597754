"""Where descriptions of several ranks differ."""

from collections.abc import Sequence
from typing import Any

MAX_SHOWN = 120


def find_difference(values: Sequence[Any], path: str = "") -> str | None:
    """Say where the values of ranks differ first, and what each has there; None if all are equal.

    Args:
        values: One of each rank: numbers, strings and the like, in lists, tuples and dicts at any depth.
        path: Of the values in what they are part of.
    """
    first = values[0]
    if all(value == first and type(value) is type(first) for value in values):
        return None
    for key in _common_keys(values):
        found = find_difference([value[key] for value in values], f"{path}[{key!r}]")
        if found is not None:
            return found
    shown: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        shown.setdefault(_shorten(repr(value)), []).append(str(rank))
    each = "; ".join(
        f"{text} on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}" for text, ranks in shown.items()
    )
    return f"{path}: {each}" if path else each


def _common_keys(values: Sequence[Any]) -> list[Any]:
    """List the places to look into: none where the values have different ones themselves."""
    if all(isinstance(value, dict) for value in values):
        return list(values[0]) if all(value.keys() == values[0].keys() for value in values) else []
    if all(isinstance(value, list | tuple) for value in values):
        # Where one is longer, what they have in common may differ before its end.
        return list(range(min(map(len, values))))
    return []


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
