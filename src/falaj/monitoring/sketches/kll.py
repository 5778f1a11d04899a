"""Parse serialized KLL sketches, and reject bytes that are not a valid sketch.

The datasketches library does not validate its input, so all bytes are checked here first.
Layout (little-endian): preamble length, version, family, flags, k, m; with two or more values also n, smallest k,
number of levels, offset of each level, minimum, maximum, and the values. A value of level h has the weight 2^h.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import log, sqrt

import numpy as np
import numpy.typing as npt

from falaj.errors import Damaged
from falaj.records.monitoring.sketches import FeatureSketch

Floats = npt.NDArray[np.float64]

K = 800
RANK_ERROR = 2.296 / K**0.9723
"""Maximum error of all ranks with 99 % confidence (the library's own fit)."""
SHARE_ERROR = 2.446 / K**0.9433
"""The same for the share of values between two points."""
TAIL = sqrt(log(2 / 0.01))
"""Scales the errors above: an error beyond t · RANK_ERROR / TAIL has probability ≤ 2·exp(-t²)."""

_SHORT, _FULL, _M, _FAMILY = 2, 5, 8, 15
_EMPTY, _SORTED, _SINGLE = 1, 2, 4
_LEVELS_LIMIT = 31  # beyond 10^12 values


@dataclass(frozen=True)
class Points:
    """Sorted values; `cumulated[i]` values of the stream are ≤ `values[i]`. Exact until the sketch compacts."""

    values: Floats
    cumulated: Floats
    exact: bool

    @property
    def count(self) -> int:
        return int(self.cumulated[-1]) if len(self.cumulated) else 0

    @property
    def rank_error(self) -> float:
        return 0.0 if self.exact else RANK_ERROR

    @property
    def share_error(self) -> float:
        return 0.0 if self.exact else SHARE_ERROR

    def at_or_below(self, edges: Floats) -> Floats:
        """Return the number of values ≤ each of `edges`."""
        return np.concatenate([[0.0], self.cumulated])[np.searchsorted(self.values, edges, side="right")]

    def quantiles(self, ranks: Floats) -> Floats:
        """Return the smallest values whose ranks are at least `ranks`."""
        found = np.searchsorted(self.cumulated, ranks * self.count, side="left")
        return self.values[np.minimum(found, len(self.values) - 1)]


def read_points(feature: FeatureSketch) -> Points:
    """Return the points of a numeric `feature`. Raise Damaged if its bytes are invalid or contradict the record."""
    try:
        values, weights, bounds = _parse(feature.sketch or b"")
    except (_Malformed, struct.error) as problem:
        raise Damaged(f"the sketch of {feature.name!r} is damaged: {problem}") from None
    if int(weights.sum()) != feature.count:
        raise Damaged(f"the sketch of {feature.name!r} has another number of values than its record")
    if len(values) and bounds != (feature.minimum, feature.maximum):
        raise Damaged(f"the sketch of {feature.name!r} has another minimum or maximum than its record")
    order = np.argsort(values, kind="stable")
    return Points(
        values[order], np.cumsum(weights[order]).astype(np.float64), exact=bool((weights == 1).all())
    )


class _Malformed(Exception):
    pass


_Parsed = tuple[Floats, npt.NDArray[np.int64], tuple[float, float]]


def _parse(data: bytes) -> _Parsed:
    preamble, version, family, flags, k, m, _ = struct.unpack_from("<BBBBHBB", data)
    _require(family == _FAMILY and k == K and m == _M, f"not a KLL sketch with k = {K}")
    if preamble == _SHORT:
        return _parse_short(data, version, flags)
    _require(preamble == _FULL and version == 1 and not flags & ~_SORTED, "its header is unknown")
    return _parse_full(data, is_sorted=bool(flags & _SORTED))


def _parse_short(data: bytes, version: int, flags: int) -> _Parsed:
    if version == 1 and flags & _EMPTY and not flags & _SINGLE:
        _require(len(data) == 8, "its length is wrong")
        return np.empty(0), np.empty(0, np.int64), (0.0, 0.0)
    _require(version == 2 and bool(flags & _SINGLE) and not flags & _EMPTY, "its header is unknown")
    _require(len(data) == 16, "its length is wrong")
    (value,) = struct.unpack_from("<d", data, 8)
    _require(value == value, "it holds NaN")
    return np.array([value]), np.ones(1, np.int64), (value, value)


def _parse_full(data: bytes, *, is_sorted: bool) -> _Parsed:
    count, smallest_k, levels, _ = struct.unpack_from("<QHBB", data, 8)
    _require(smallest_k == K and count >= 2 and 1 <= levels <= _LEVELS_LIMIT, "its header is unknown")
    begins = [*struct.unpack_from(f"<{levels}I", data, 20), _capacity(levels)]
    _require(begins == sorted(begins), "its levels overlap")
    sizes = np.diff(begins)
    body = 20 + 4 * levels
    _require(len(data) == body + 8 * (2 + int(sizes.sum())), "its length is wrong")
    _require(
        sum(int(size) << level for level, size in enumerate(sizes)) == count, "its weights do not add up"
    )
    low, high = struct.unpack_from("<dd", data, body)
    values = np.frombuffer(data, "<f8", offset=body + 16).astype(np.float64)
    _require(bool(((values >= low) & (values <= high)).all()) and low <= high, "a value is out of its bounds")
    for level in range(0 if is_sorted else 1, levels):
        run = values[begins[level] - begins[0] : begins[level + 1] - begins[0]]
        _require(bool((run[1:] >= run[:-1]).all()), "a level is not sorted")
    return values, np.repeat(np.int64(1) << np.arange(levels), sizes), (low, high)


def _capacity(levels: int) -> int:
    """Return the capacity of a sketch with `levels` levels: k at the top, two thirds of that on each level below."""
    return sum(max(_M, ((2 * K << depth) // 3**depth + 1) >> 1) for depth in range(levels))


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise _Malformed(problem)
