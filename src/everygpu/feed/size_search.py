"""The largest size that fits, in few trials: doubled or halved, then bisected."""

from collections.abc import Callable

PRECISION = 0.05
"""The search stops when the largest size that fits and the smallest that doesn't are this close."""


def find_size(fits: Callable[[int], bool], start: int, lowest: int, highest: int, grain: int) -> int | None:
    """Search for the largest size that fits: double or halve until a smaller fits and a larger doesn't, then bisect.

    Args:
        fits: Tries a size.
        start: The first to try.
        lowest: The smallest to try.
        highest: The largest to try.
        grain: Sizes in between are multiples of this.
    Returns:
        A size that fits; None when the smallest doesn't.
    """
    low, high = _grow(fits, start, highest) if fits(start) else _shrink(fits, start, lowest)
    if low is None:
        return None
    while (middle := _between(low, high, grain)) is not None:
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _grow(fits: Callable[[int], bool], size: int, highest: int) -> tuple[int, int]:
    while size < highest:
        larger = min(2 * size, highest)
        if not fits(larger):
            return size, larger
        size = larger
    return size, highest + 1


def _shrink(fits: Callable[[int], bool], size: int, lowest: int) -> tuple[int | None, int]:
    while size > lowest:
        smaller = max(size // 2, lowest)
        if fits(smaller):
            return smaller, size
        size = smaller
    return None, size


def _between(fits: int, fails: int, grain: int) -> int | None:
    """Choose a size in the middle: a multiple of the grain, or None when the two are close enough."""
    if fails - fits <= max(1, PRECISION * fits):
        return None
    middle = (fits + fails) // 2
    rounded = middle // grain * grain
    if fits < rounded < fails:
        return rounded
    return None if fits >= grain else middle
