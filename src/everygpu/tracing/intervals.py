"""Stretches of time as sorted lists of disjoint (begin, end) pairs."""

from collections.abc import Iterable
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]
"""Begin and end, in any one unit."""
Intervals: TypeAlias = list[Interval]
"""Sorted, disjoint, none empty: what ``union`` returns."""


def union(intervals: Iterable[Interval]) -> Intervals:
    """Join what overlaps or touches.

    Args:
        intervals: In any order; empty ones are left out.
    """
    joined: Intervals = []
    for begin, end in sorted(i for i in intervals if i[0] < i[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """Return the time that is in both."""
    found: Intervals = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(one: Intervals, other: Intervals) -> Intervals:
    """Return the time of the first that is not in the second."""
    if not one:
        return []
    first, last = one[0][0], one[-1][1]
    return intersect(one, gaps(other, (first, last)))


def gaps(intervals: Intervals, window: Interval) -> Intervals:
    """Return the time of a window that is in none of them."""
    left: Intervals = []
    at, end = window
    for begin, until in intervals:
        if at < min(begin, end):
            left.append((at, min(begin, end)))
        at = max(at, until)
    if at < end:
        left.append((at, end))
    return left


def total(intervals: Intervals) -> float:
    """Add up the lengths."""
    return sum(end - begin for begin, end in intervals)
