"""KLL sketches: ranks and quantiles of a stream of numbers in constant memory (Karnin, Lang, Liberty, FOCS 2016).

A value of level h stands for 2^h values of the stream. To compact a level, every second of its sorted values moves up,
from a random start. The bytes have the layout of Apache DataSketches (little-endian): preamble length, version, family,
flags, k, m; with two or more values also n, smallest k, number of levels, offset of each level, minimum, maximum, and
the values. Decision 0067 says why this is written here, and what differs from the paper.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf, log, sqrt

import numpy as np
import numpy.typing as npt

from falaj.errors import Damaged

Floats = npt.NDArray[np.float64]

K = 800
RANK_ERROR = 2.296 / K**0.9723
"""Maximum error of all ranks with 99 % confidence (the fit of Apache DataSketches, whose errors are larger)."""
SHARE_ERROR = 2.446 / K**0.9433
"""The same for the share of values between two points."""
TAIL = sqrt(log(2 / 0.01))
"""Scales the errors above: an error beyond t · RANK_ERROR / TAIL has probability ≤ 2·exp(-t²)."""

BUFFER = 2048
"""Values that wait to be sorted together."""
CHUNK = 2**16
"""Values of a larger batch that are sorted together."""
MERGED_TOGETHER = 32
"""Merged sketches wait to be compacted until they hold so many times the capacity."""
SORTED_TOGETHER = 4 * K
"""In a level with more values, long runs are not merged before they are compacted: sorting would cost most."""

_M = 8
_CAPACITIES = [max(_M, ((2 * K << depth) // 3**depth + 1) >> 1) for depth in range(64)]
"""Capacity of a level by its depth below the top: k, and two thirds of that on each level below."""
_TOTALS = [0, *accumulate(_CAPACITIES)]
_LEVELS_LIMIT = 31  # beyond 10^12 values
_FLOAT64 = np.dtype(np.float64)
_NONE = np.empty(0)

_HEADER, _BODY = "<BBBBHBB", "<QHBB"
_SHORT, _FULL, _FAMILY = 2, 5, 15
_EMPTY, _SORTED, _SINGLE = 1, 2, 4


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


class KllSketch:
    """Sketches numbers: NaN is skipped, infinities are values. Not thread-safe.

    The same calls with an equal `rng` give the same sketch.
    """

    def __init__(self, *, rng: random.Random | None = None) -> None:
        self._draw = (rng or random).getrandbits
        self._pending = bytearray()
        self._levels: list[list[Floats]] = [[]]  # sorted arrays, which are never modified
        self._retained = 0
        self._count = 0
        self._minimum, self._maximum = inf, -inf
        self._starts: dict[tuple[int, int], int] = {}

    @property
    def count(self) -> int:
        self._flush()
        return self._count

    @property
    def minimum(self) -> float | None:
        return self._minimum if self.count else None

    @property
    def maximum(self) -> float | None:
        return self._maximum if self.count else None

    def update(self, values: Floats) -> None:
        """Add the values of an array."""
        if values.dtype is not _FLOAT64:
            values = values.astype(np.float64)
        if values.size < BUFFER:
            self._pending += values.tobytes()
            if len(self._pending) >= BUFFER * 8:
                self._flush()
            return
        flat = values.ravel()
        for begin in range(0, len(flat), CHUNK):
            self._add(np.sort(flat[begin : begin + CHUNK]))

    def merge(self, other: KllSketch) -> None:
        """Add the values of `other`, which stays as it is."""
        other._flush()
        for level, runs in enumerate(other._levels):
            if level == len(self._levels):
                self._levels.append([])
            self._levels[level] += runs
        self._retained += other._retained
        self._count += other._count
        self._minimum = min(self._minimum, other._minimum)
        self._maximum = max(self._maximum, other._maximum)
        if self._retained > MERGED_TOGETHER * _TOTALS[len(self._levels)]:
            self._compress()

    def points(self) -> Points:
        levels = self._settle()
        values = np.concatenate(levels)
        weights = np.repeat(np.int64(1) << np.arange(len(levels)), [len(level) for level in levels])
        order = np.argsort(values, kind="stable")
        cumulated = np.cumsum(weights[order]).astype(np.float64)
        return Points(values[order], cumulated, exact=self._retained == self._count)

    def to_bytes(self) -> bytes:
        levels = self._settle()
        if not self._count:
            return struct.pack(_HEADER, _SHORT, 1, _FAMILY, _EMPTY, K, _M, 0)
        if self._count == 1:
            return struct.pack(_HEADER + "d", _SHORT, 2, _FAMILY, _SINGLE, K, _M, 0, self._minimum)
        ends = accumulate(map(len, levels), initial=_TOTALS[len(levels)] - self._retained)
        begins = struct.pack(f"<{len(levels)}I", *list(ends)[:-1])
        return b"".join(
            (
                struct.pack(_HEADER, _FULL, 1, _FAMILY, _SORTED, K, _M, 0),
                struct.pack(_BODY, self._count, K, len(levels), 0),
                begins,
                struct.pack("<dd", self._minimum, self._maximum),
                np.concatenate(levels).astype("<f8", copy=False).tobytes(),
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, rng: random.Random | None = None) -> KllSketch:
        """Read what `to_bytes` or Apache DataSketches wrote. Raise Damaged if a sketch cannot have these bytes."""
        sketch = cls(rng=rng)
        try:
            preamble, version, family, flags, k, m, _ = struct.unpack_from(_HEADER, data)
            _require(family == _FAMILY and k == K and m == _M, f"not of a KLL sketch with k = {K}")
            if preamble == _SHORT:
                sketch._read_short(data, version, flags)
            else:
                known = preamble == _FULL and version == 1 and not flags & ~_SORTED
                _require(known, "unknown header")
                sketch._read_full(data, is_sorted=bool(flags & _SORTED))
        except struct.error:
            raise Damaged("invalid bytes of a sketch: too short") from None
        return sketch

    def _read_short(self, data: bytes, version: int, flags: int) -> None:
        if version == 1 and flags & _EMPTY and not flags & _SINGLE:
            _require(len(data) == 8, "wrong length")
            return
        _require(version == 2 and bool(flags & _SINGLE) and not flags & _EMPTY, "unknown header")
        _require(len(data) == 16, "wrong length")
        (value,) = struct.unpack_from("<d", data, 8)
        _require(value == value, "NaN")
        self._add(np.array([value]))

    def _read_full(self, data: bytes, *, is_sorted: bool) -> None:
        count, smallest_k, height, _ = struct.unpack_from(_BODY, data, 8)
        _require(smallest_k == K and count >= 2 and 1 <= height <= _LEVELS_LIMIT, "unknown header")
        begins = [*struct.unpack_from(f"<{height}I", data, 20), _TOTALS[height]]
        _require(begins == sorted(begins), "levels overlap")
        ends = [end - begins[0] for end in begins]
        body = 20 + 4 * height
        _require(len(data) == body + 8 * (2 + ends[-1]), "wrong length")
        levels = list(pairwise(ends))
        weight = sum((end - begin) << level for level, (begin, end) in enumerate(levels))
        _require(weight == count, "the weights do not add up")
        self._minimum, self._maximum = struct.unpack_from("<dd", data, body)
        values = np.frombuffer(data, "<f8", offset=body + 16).astype(np.float64, copy=False)
        if not is_sorted:
            values = np.concatenate([np.sort(values[: ends[1]]), values[ends[1] :]])
        within = values.min() >= self._minimum and values.max() <= self._maximum
        _require(bool(within), "a value is out of bounds")  # NaN is neither above nor below
        falls = np.flatnonzero(values[1:] < values[:-1]) + 1
        _require(set(ends).issuperset(falls.tolist()), "a level is not sorted")
        self._levels = [[values[begin:end]] if begin < end else [] for begin, end in levels]
        self._retained, self._count = ends[-1], count

    # ------------------------------------------------------------------------------------- compaction

    def _flush(self) -> None:
        """Add the values that wait in the buffer."""
        if self._pending:
            values = np.frombuffer(self._pending)
            self._pending = bytearray()
            values.sort()
            self._add(values)

    def _add(self, values: Floats) -> None:
        """Add sorted values: one of 2^level, from a random start, to the lowest level that has room for them."""
        if len(values) and values[-1] != values[-1]:
            values = values[: np.searchsorted(values, np.nan)]  # NaN is last
        if not len(values):
            return
        self._count += len(values)
        self._minimum = min(self._minimum, float(values[0]))
        self._maximum = max(self._maximum, float(values[-1]))
        while len(values):
            level = self._find_level(len(values))
            kept = len(values) >> level
            self._levels += [[] for _ in range(level + 1 - len(self._levels))]
            start = self._choose_start(0, level)
            self._levels[level].append(values[start : kept << level : 1 << level].copy())
            self._retained += kept
            values = values[kept << level :]
        self._compress()

    def _find_level(self, count: int) -> int:
        level, height = 0, len(self._levels)
        while (
            count >> level > _CAPACITIES[height - 1 - level]
            and self._retained + (count >> level) > _TOTALS[height]
        ):
            level += 1
            height = max(height, level + 1)
        return level

    def _choose_start(self, level: int, bits: int) -> int:
        """Return a random number below 2^bits, and the next time its opposite: the errors of the two cancel out."""
        previous = self._starts.pop((level, bits), None)
        if previous is not None:
            return (1 << bits) - 1 - previous
        start = self._starts[level, bits] = self._draw(bits)
        return start

    def _compress(self) -> None:
        """Compact full levels from the lowest up until the values fit."""
        level = 0
        while self._retained > _TOTALS[len(self._levels)]:
            size, capacity = sum(map(len, self._levels[level])), _CAPACITIES[len(self._levels) - 1 - level]
            if size >= capacity:
                alone = max(capacity, K // 4) if size > SORTED_TOGETHER else size + 1
                self._compact(level, alone=alone)
            level = (level + 1) % len(self._levels)

    def _compact(self, level: int, *, alone: int) -> None:
        """Move every second value of a level up. Runs shorter than `alone` are merged before."""
        if level + 1 == len(self._levels):
            self._levels.append([])
        runs, above = self._levels[level], self._levels[level + 1]
        long, short = [run for run in runs if len(run) >= alone], [run for run in runs if len(run) < alone]
        if short:
            long.append(_merge_runs(short))
        start, rest = self._choose_start(level, 1), []
        for run in long:
            even = len(run) & ~1
            above.append(run[start:even:2].copy())
            self._retained -= even >> 1
            start = 1 - start
            if even < len(run):
                rest.append(run[even:].copy())
        self._levels[level] = rest

    def _settle(self) -> list[Floats]:
        """Compact what waits, and return the levels, each as one sorted array."""
        self._flush()
        self._compress()
        self._levels = [[_merge_runs(runs)] if runs else [] for runs in self._levels]
        return [runs[0] if runs else _NONE for runs in self._levels]


def _merge_runs(runs: list[Floats]) -> Floats:
    if len(runs) == 1:
        return runs[0]
    merged = np.concatenate(runs)
    merged.sort()
    return merged


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise Damaged(f"invalid bytes of a sketch: {problem}")
