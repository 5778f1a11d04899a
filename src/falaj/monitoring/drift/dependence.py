"""Dependence between rows: how much blocks of a training set differ beyond chance, and what a window may differ by.

Rows of one day or one burst resemble each other, so that a window varies more than as many independent rows would. The
training set shows by how much: its rows are counted by block of time, and the variance of the blocks beyond that of
independent rows is the variance that a window of the same duration has on top (decision 0026).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf, log, log2, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from falaj.monitoring.drift.bins import CATEGORY_BINS, reference_edges
from falaj.monitoring.drift.distributions import chi_square_critical
from falaj.monitoring.sketches.columns import Values, numbers
from falaj.monitoring.sketches.reading import read_points
from falaj.records.monitoring.sketches import BlockSpread, ColumnKind, FeatureSketch, ReferenceSketch
from falaj.records.quantiles.kll import Floats

MINUTE, HOUR, DAY = 60, 3600, 86_400
SPANS_S = (
    *(1, 10, MINUTE, 5 * MINUTE, 15 * MINUTE, HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR),
    *(DAY, 7 * DAY, 28 * DAY),
)
"""Durations of blocks; each divides the next. Days and weeks are among them, because traffic follows them."""
MIN_BLOCKS = 8
"""Blocks, weighted by their rows, that show a variance."""
LARGEST_ERROR = 0.01
"""The largest standard error of a spread that is used: a tenth of a standard deviation, as an effect."""
CELLS_LIMIT = 2**21
"""Counts in memory while a training set is read, over all columns: 8 MiB."""
NOISE = 5.0
"""Standard errors up to which a spread may be noise: only positive variances are added up."""
MOST_SPREAD = 50.0
"""The largest spread that is extrapolated: beyond it, nothing alarms anyway."""
LIGHT_TAIL = 4.0
"""The least degrees of freedom of the tail; fewer have no kurtosis that could be estimated."""

Counts = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ColumnBins:
    """The bins of one column: `edges` of numbers or names of categories, then the rest; nulls are the last bin."""

    kind: ColumnKind
    edges: Floats
    names: pa.Array

    @classmethod
    def of(cls, sketch: FeatureSketch) -> ColumnBins:
        if sketch.kind is ColumnKind.NUMERIC:
            edges = reference_edges(read_points(sketch)) if sketch.count else np.empty(0)
            return cls(sketch.kind, edges, pa.array([], pa.large_string()))
        frequent = sorted(sketch.categories, key=lambda name: (-sketch.categories[name], name))
        return cls(sketch.kind, np.empty(0), pa.array(frequent[:CATEGORY_BINS], pa.large_string()))

    @property
    def width(self) -> int:
        return len(self.edges) + len(self.names) + 2

    @property
    def ordered(self) -> int:
        """Return the number of bins that have an order: those of numbers."""
        return len(self.edges) + 1 if self.kind is ColumnKind.NUMERIC else 0

    def codes(self, values: Values, *, name: str) -> npt.NDArray[np.int64]:
        """Return the bin of each value."""
        if self.kind is ColumnKind.NUMERIC:
            floats = numbers(values, name=name)
            found = np.searchsorted(self.edges, floats, side="left")
            return np.where(np.isnan(floats), self.width - 1, found)
        column = pa.array(values, from_pandas=True) if isinstance(values, np.ndarray) else values
        texts = pc.cast(column, pa.large_string())
        found = pc.fill_null(pc.index_in(texts, value_set=self.names), self.width - 2)
        return np.asarray(pc.if_else(pc.is_null(texts), self.width - 1, found))

    def counts(self, sketch: FeatureSketch) -> Floats:
        """Return the rows of a sketch by bin."""
        if self.kind is ColumnKind.NUMERIC:
            points = read_points(sketch)
            below = np.diff(points.at_or_below(self.edges), prepend=0, append=points.count)
            return np.append(below, float(sketch.nulls))
        named = [float(sketch.categories.get(name, 0)) for name in self.names.to_pylist()]
        return np.array([*named, sketch.count - sum(named), float(sketch.nulls)])


class BlockCounter:
    """Counts the rows of a training set by column, block of time and bin. Times are microseconds since 1970."""

    def __init__(self, reference: ReferenceSketch, *, first: int, last: int) -> None:
        self._bins = {sketch.name: ColumnBins.of(sketch) for sketch in reference.features}
        width = sum(bins.width for bins in self._bins.values())
        able = [span for span in SPANS_S if _blocks(first, last, span) * width <= CELLS_LIMIT]
        self._span = able[0] if able else None
        self._first = 0 if self._span is None else first // (self._span * 1_000_000)
        blocks = 0 if self._span is None else _blocks(first, last, self._span)
        self._counts = {name: np.zeros((blocks, bins.width), np.int32) for name, bins in self._bins.items()}

    def add(self, times: npt.NDArray[np.int64], columns: dict[str, Any]) -> None:
        if self._span is None:
            return
        block = times // (self._span * 1_000_000) - self._first
        for name, counts in self._counts.items():
            bins = self._bins[name]
            np.add.at(counts, (block, bins.codes(columns[name], name=name)), 1)

    def spreads(self) -> dict[str, tuple[BlockSpread, ...]]:
        """Return the spreads of each column by span, the shortest first; only those that the rows can show."""
        if self._span is None:
            return {}
        ids = np.arange(len(next(iter(self._counts.values())))) + self._first
        found: dict[str, list[BlockSpread]] = {name: [] for name in self._counts}
        for span in SPANS_S[SPANS_S.index(self._span) :]:
            starts = np.flatnonzero(np.diff(ids * self._span // span, prepend=-1))
            for name, counts in self._counts.items():
                spread = measure_spread(
                    np.add.reduceat(counts, starts, axis=0), span_s=span, ordered=self._bins[name].ordered
                )
                found[name] += [] if spread is None else [spread]
        return {name: tuple(spreads) for name, spreads in found.items()}


def _blocks(first: int, last: int, span: int) -> int:
    return last // (span * 1_000_000) - first // (span * 1_000_000) + 1


def measure_spread(counts: npt.NDArray[Any], *, span_s: float, ordered: int) -> BlockSpread | None:
    """Return the spread of blocks (rows of `counts`) over bins (columns); None if there are too few rows or blocks.

    `ordered` bins come first and belong to numbers.
    """
    table = np.asarray(counts[counts.sum(axis=1) > 0], np.float64)
    ranks, ranks_tail, farthest_ranks = _rank_spread(table[:, :ordered])
    table = table[:, table.sum(axis=0) > 0]
    rows = table.sum(axis=1)
    total, pairs = rows.sum(), float((rows * (rows - 1)).sum())
    blocks = float(total**2 / (rows**2).sum()) if len(rows) else 0.0
    bins = table.shape[1]
    error = sqrt(2 * max(bins - 1, 1) / pairs) if pairs > 0 else inf
    if blocks < MIN_BLOCKS or error > LARGEST_ERROR:
        return None
    shares = table.sum(axis=0) / total
    away = (table / rows[:, None] - shares) / np.sqrt(shares)
    variances, direction = _directions(away, rows, shares, blocks)
    chance = chi_square_critical(1 / len(rows), max(bins - 1, 1)) / rows
    spread = float(variances.sum())
    return BlockSpread(
        span_s=span_s,
        blocks=blocks,
        error=error,
        shares=spread,
        largest=float(variances[-1]),
        # At least 1, which rounding can undercut.
        dimensions=max(1.0, spread**2 / float((variances**2).sum())) if spread else 1.0,
        shares_tail=_tail(blocks, _kurtosis(away @ direction, rows)),
        farthest_shares=max(0.0, float(((away**2).sum(axis=1) - chance).max())),
        ranks=ranks,
        ranks_tail=ranks_tail,
        farthest_ranks=farthest_ranks,
    )


def _rank_spread(table: Floats) -> tuple[float, float, float]:
    """Return the largest variance of a cumulative share, its tail, and the farthest block."""
    table = table[table.sum(axis=1) > 0]
    rows = table.sum(axis=1)
    blocks = float(rows.sum() ** 2 / (rows**2).sum()) if len(rows) else 0.0
    if table.shape[1] < 2 or blocks < MIN_BLOCKS or (rows <= 1).all():
        return 0.0, 1.0, 0.0
    below = np.cumsum(table, axis=1)[:, :-1]
    shares = below.sum(axis=0) / rows.sum()
    away = below / rows[:, None] - shares
    squares = ((rows[:, None] * away) ** 2).sum(axis=0) * blocks / (blocks - 1)
    variances = (squares - rows.sum() * shares * (1 - shares)) / (rows * (rows - 1)).sum()
    most = int(variances.argmax())
    farthest = np.abs(away).max(axis=1) - np.sqrt(log(2 * len(rows)) / 2 / rows)
    tail = _tail(blocks, _kurtosis(away[:, most], rows))
    return max(0.0, float(variances[most])), tail, max(0.0, float(farthest.max()))


def _directions(away: Floats, rows: Floats, shares: Floats, blocks: float) -> tuple[Floats, Floats]:
    """Return the variances of shares between blocks beyond those of independent rows, and the direction of the largest.

    They are the eigenvalues of the mean product of two rows of the same block, which does not depend on the number of
    rows. Negative ones, as of a timetable, are no variance.
    """
    scaled = rows[:, None] * away
    products = scaled.T @ scaled * blocks / (blocks - 1)
    roots = np.sqrt(shares)
    alone = rows.sum() * (np.eye(len(shares)) - np.outer(roots, roots))
    values, vectors = np.linalg.eigh((products - alone) / (rows * (rows - 1)).sum())
    return np.maximum(values, 0.0), vectors[:, -1]


def _kurtosis(values: Floats, rows: Floats) -> float:
    weights = rows / rows.sum()
    second = float(weights @ values**2)
    return float(weights @ values**4) / second**2 if second > 0 else 3.0


def _tail(blocks: float, kurtosis: float) -> float:
    """Return degrees of freedom for the uncertainty of the variance and for blocks farther out than normal ones.

    Few blocks cannot show how far out others may lie: each counts as half a degree.
    """
    heavy = LIGHT_TAIL + 6 / (kurtosis - 3) if kurtosis > 3 else inf
    return float(min((blocks - 1) / 2, heavy))


# ----------------------------------------------------------------------------------------- a comparison


@dataclass(frozen=True)
class Excess:
    """The variance of a difference beyond that of independent rows; see `BlockSpread` for the units."""

    shares: float = 0.0
    largest: float = 0.0
    dimensions: float = 1.0
    shares_tail: float = inf
    farthest_shares: float = 0.0
    ranks: float = 0.0
    ranks_tail: float = inf
    farthest_ranks: float = 0.0
    blocks: float = inf


INDEPENDENT = Excess()


def excess_of(
    spreads: Sequence[BlockSpread], duration: timedelta, *, within: BlockSpread | None = None
) -> Excess:
    """Return the excess of a window of `duration` over a training set with `spreads`.

    `within` is the spread of the window's own parts, which shows bursts that the training set does not have.
    """
    parts = [] if within is None else [_scaled(within, 1 / within.blocks)]
    parts += [_at(spreads, duration.total_seconds())] if spreads else []
    if not parts:
        return INDEPENDENT
    by_shares, by_ranks = max(parts, key=lambda s: s.largest), max(parts, key=lambda s: s.ranks)
    whole = max((s.shares / s.blocks for s in spreads), default=0.0)
    return Excess(
        shares=by_shares.shares + whole,
        largest=by_shares.largest + whole,
        dimensions=by_shares.dimensions,
        shares_tail=by_shares.shares_tail,
        farthest_shares=parts[-1].farthest_shares if spreads else 0.0,
        ranks=by_ranks.ranks + max((s.ranks / s.blocks for s in spreads), default=0.0),
        ranks_tail=by_ranks.ranks_tail,
        farthest_ranks=parts[-1].farthest_ranks if spreads else 0.0,
        blocks=parts[-1].blocks,
    )


def spread_within(reference: FeatureSketch, parts: Sequence[FeatureSketch]) -> BlockSpread | None:
    """Return the spread of the parts of a window, over the bins of the reference; None if there are too few."""
    if len(parts) < MIN_BLOCKS:
        return None
    bins = ColumnBins.of(reference)
    counts = np.stack([bins.counts(part) for part in parts])
    return measure_spread(counts, span_s=0.0, ordered=bins.ordered)


def _at(spreads: Sequence[BlockSpread], seconds: float) -> BlockSpread:
    """Return the spread of blocks that last as long as a window: of the longest span that is not longer.

    A shorter block spreads more. The spread of a window shorter than all is extrapolated by the ratio of the two
    shortest, if it is more than noise: where blocks are longer than what rows have in common, the spread is inverse to
    the span; where they are shorter, the ratio falls to 1.
    """
    shortest = spreads[0]
    if seconds >= shortest.span_s or shortest.shares < NOISE * shortest.error:
        return [each for each in spreads if each.span_s <= seconds or each is shortest][-1]
    factor = shortest.span_s / max(seconds, 1e-3)
    if len(spreads) > 1:
        step = spreads[1].span_s / shortest.span_s
        ratio = min(step, shortest.shares / max(spreads[1].shares, 1e-9))
        factor = max(1.0, ratio) ** (log2(factor) / log2(step))
    return _scaled(shortest, min(factor, MOST_SPREAD / shortest.shares))


def _scaled(spread: BlockSpread, factor: float) -> BlockSpread:
    scaled = {name: getattr(spread, name) * factor for name in ("shares", "largest", "ranks")}
    return spread.model_copy(update=scaled)
