"""Sets of moments, as sorted intervals that do not touch: what was going on when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]
Intervals: TypeAlias = list[Interval]
"""Sorted, and none touches the next."""


def union(intervals: Iterable[Interval]) -> Intervals:
    """All the moments of `intervals`, which may lie as they like."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """The moments that are in both."""
    return difference(one, difference(one, other))


def difference(one: Intervals, other: Intervals) -> Intervals:
    """The moments of `one` that are not in `other`."""
    found: Intervals = []
    at = 0
    for start, end in one:
        while at < len(other) and other[at][1] <= start:
            at += 1
        place = at
        while place < len(other) and other[place][0] < end:
            if start < other[place][0]:
                found.append((start, other[place][0]))
            start = other[place][1]
            place += 1
        if start < end:
            found.append((start, end))
    return found


def total_seconds(moments: Intervals) -> float:
    return sum(end - start for start, end in moments)
