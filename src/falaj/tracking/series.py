"""Points of one metric of one run: their identity and their summary. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from falaj.ports.metadata import to_micros
from falaj.records.tracking import MetricPoint

Point = tuple[int, int, float, bool]
"""Step, time in microseconds, value, and whether it is NaN (the value is 0 then, so that points can be compared)."""


@dataclass(frozen=True)
class SeriesSummary:
    """The number of points, the greatest of them, and the extremes of those that are numbers."""

    points: int
    greatest: Point
    low: float | None
    high: float | None

    def is_before(self, new: list[Point]) -> bool:
        """Return whether all of the sorted `new` come after the summarized points, which is the usual case."""
        return new[0][:2] > self.greatest[:2]


def group_points(points: Iterable[MetricPoint], *, now: datetime) -> dict[str, list[Point]]:
    """Return the points of each key, sorted and without duplicates."""
    arrived = to_micros(now)
    groups: dict[str, set[Point]] = {}
    for given in points:
        at = arrived if given.timestamp is None else to_micros(given.timestamp)
        is_nan = given.value != given.value
        point = (given.step, at, 0.0 if is_nan else given.value, is_nan)
        groups.setdefault(given.key, set()).add(point)
    return {key: sorted(found) for key, found in groups.items()}


def extend_summary(known: SeriesSummary | None, new: list[Point]) -> SeriesSummary:
    """Return the summary after the sorted `new`, none of which was there before."""
    numbers = [value for _, _, value, is_nan in new if not is_nan]
    if known is None:
        return SeriesSummary(len(new), new[-1], min(numbers, default=None), max(numbers, default=None))
    lows = numbers if known.low is None else [known.low, *numbers]
    highs = numbers if known.high is None else [known.high, *numbers]
    return SeriesSummary(
        points=known.points + len(new),
        greatest=max(known.greatest, new[-1]),
        low=min(lows, default=None),
        high=max(highs, default=None),
    )
