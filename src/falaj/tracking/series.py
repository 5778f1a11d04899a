"""Points of one metric of one run: their identity, their summary, how they are packed and thinned out. No I/O."""

from __future__ import annotations

import operator
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from falaj.ports.metadata import to_micros
from falaj.records.tracking import MetricPoint, PointColumns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Steps: TypeAlias = NDArray[np.int64]
    Values: TypeAlias = NDArray[np.float64]

Point = tuple[int, int, float, bool]
"""Step, time in microseconds, value, and whether it is NaN (the value is 0 then, so that points can be compared)."""

POINT_BYTES = 24
NAN = float("nan")


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


def group_points(points: Iterable[MetricPoint] | PointColumns, *, now: datetime) -> dict[str, list[Point]]:
    """Return the points of each key, sorted and without duplicates."""
    groups: defaultdict[str, list[Point]] = defaultdict(list)
    for key, step, at, value in _rows(points, to_micros(now)):
        groups[key].append((step, at, value, False) if value == value else (step, at, 0.0, True))
    return {key: _distinct(found) for key, found in groups.items()}


def _rows(
    points: Iterable[MetricPoint] | PointColumns, arrived: int
) -> Iterable[tuple[str, int, int, float]]:
    if isinstance(points, PointColumns):
        return zip(points.keys, points.steps, points.moments, points.values, strict=True)
    return (
        (each.key, each.step, arrived if each.timestamp is None else to_micros(each.timestamp), each.value)
        for each in points
    )


def _distinct(points: list[Point]) -> list[Point]:
    """Return points sorted, each once; they usually are."""
    is_sorted = all(map(operator.lt, points, points[1:]))
    return points if is_sorted else sorted({*points})


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


# ---------------------------------------------------------------------------------------- packed points


def pack(points: Sequence[Point]) -> bytes:
    """Return points as they are stored: all steps, then all times, then all values, little-endian."""
    size = len(points)
    steps, moments, numbers, nans = zip(*points, strict=True)
    if True in nans:
        numbers = tuple(NAN if is_nan else value for value, is_nan in zip(numbers, nans, strict=True))
    return struct.pack(f"<{2 * size}q{size}d", *steps, *moments, *numbers)


class PackedPoints(NamedTuple):
    """Points as columns."""

    steps: Steps
    moments: Steps
    values: Values

    def __len__(self) -> int:
        return len(self.steps)

    def points(self) -> list[Point]:
        both = zip(self.steps.tolist(), self.moments.tolist(), self.values.tolist(), strict=True)
        return [
            (step, at, 0.0, True) if value != value else (step, at, value, False) for step, at, value in both
        ]

    def data(self) -> bytes:
        """Return the points as they are stored."""
        columns = (self.steps.astype("<i8"), self.moments.astype("<i8"), self.values.astype("<f8"))
        return b"".join(column.tobytes() for column in columns)

    def part(self, chosen: slice | NDArray[np.bool_] | NDArray[np.int64]) -> PackedPoints:
        return PackedPoints(self.steps[chosen], self.moments[chosen], self.values[chosen])

    def after(self, point: Point) -> PackedPoints:
        """Return those that come after `point` in the order of points."""
        import numpy as np

        step, at, value, is_nan = point
        nans = np.isnan(self.values)
        numbers = np.where(nans, 0.0, self.values)
        later = (numbers > value) | ((numbers == value) & (nans > is_nan))
        later = (self.moments > at) | ((self.moments == at) & later)
        return self.part((self.steps > step) | ((self.steps == step) & later))


def unpack(stored: Iterable[bytes]) -> PackedPoints:
    """Return the points of stored blocks together, in the order of points."""
    import numpy as np

    blocks = [memoryview(data) for data in stored]
    sizes = [len(data) // POINT_BYTES for data in blocks]
    if not blocks:
        return PackedPoints(np.empty(0, "<i8"), np.empty(0, "<i8"), np.empty(0, "<f8"))
    steps, moments, values = (
        np.concatenate(
            [
                np.frombuffer(data, kind, count=size, offset=column * 8 * size)
                for data, size in zip(blocks, sizes, strict=True)
            ]
        )
        for column, kind in enumerate(("<i8", "<i8", "<f8"))
    )
    return _sorted(PackedPoints(steps, moments, values))


def _sorted(found: PackedPoints) -> PackedPoints:
    import numpy as np

    later = found.steps[1:] > found.steps[:-1]
    if not later.all():
        later |= (found.steps[1:] == found.steps[:-1]) & (found.moments[1:] > found.moments[:-1])
    if later.all():
        return found
    nans = np.isnan(found.values)
    return found.part(np.lexsort((nans, np.where(nans, 0.0, found.values), found.moments, found.steps)))


# --------------------------------------------------------------------------------------------- curves


def thin_out(found: PackedPoints, *, limit: int) -> PackedPoints:
    """Return at most `limit` points that look the same in a plot: no peak is lost.

    They are the first and the last point, and the lowest and the highest of each of equally many points between.
    """
    import numpy as np

    size = len(found)
    if size <= limit:
        return found
    if limit < 4:
        return found.part(np.unique(np.linspace(0, size - 1, limit).astype(np.int64)))
    width = -(-(size - 2) // ((limit - 2) // 2))
    rows = -(-(size - 2) // width)
    inner = np.full(rows * width, np.nan)
    inner[: size - 2] = found.values[1:-1]
    nans = np.isnan(inner)
    starts = np.arange(rows) * width + 1
    low = np.where(nans, np.inf, inner).reshape(rows, width).argmin(axis=1)
    high = np.where(nans, -np.inf, inner).reshape(rows, width).argmax(axis=1)
    chosen = np.unique(np.concatenate(([0], starts + low, starts + high, [size - 1])))
    return found.part(chosen)
