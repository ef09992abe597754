"""Print values from a file for an error message, in bounded length."""

from reprlib import Repr
from typing import Any

_MAX_LETTERS = 240


def brief(value: Any) -> str:
    """Print a value as ``repr`` does, at most 240 letters of it.

    A list that holds another twice, that one the next twice, and so on, prints as billions of letters.
    """
    limits = Repr()
    limits.maxlevel, limits.maxstring, limits.maxother, limits.maxlong = 3, 120, 120, 120
    try:
        return cut(limits.repr(value))
    except ValueError:  # Python prints no number of more than 4300 digits
        return f"a {type(value).__name__}"


def cut(text: str, max_letters: int = _MAX_LETTERS) -> str:
    """Keep the beginning of a text that a file may have made long."""
    return text if len(text) <= max_letters else f"{text[:max_letters]}…"
