"""Sizes in bytes, as people write them."""

import re
from fractions import Fraction

from everygpu.errors import OptionError

_FACTORS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE = re.compile(r"\s*(\d{1,99}(?:\.\d{1,99})?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_size(size: int | str) -> int:
    """Turn ``"8GiB"``, ``"500 MB"`` or a number of bytes into bytes.

    Args:
        size: Bytes, or a number with an SI (kB, MB, GB, TB) or binary (KiB, MiB, GiB, TiB) unit.
    Returns:
        Whole bytes, rounded down.
    Raises:
        OptionError: the text is no size, or the number is negative.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise OptionError(f"parse_size: a size must not be negative, got {size}.")
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise OptionError(f"parse_size: a size looks like '8GiB' or '500 MB', got {size!r}.")
    return int(Fraction(match[1]) * _FACTORS[(match[2] or "").lower()])


def format_size(num_bytes: int | None) -> str:
    """Write bytes with the largest binary unit that keeps the number at one or more: ``"7.5 GiB"``; None as ``"?"``."""
    if num_bytes is None:
        return "?"
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(abs(value), 1) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
