"""Bin two samples of one column alike, with bins large enough for the chi-square approximation.

Bins are merged by their total over both samples. Under no drift only the split of that total is random, so merging by
the total does not bias the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from falaj.monitoring.sketches.columns import category_hash
from falaj.records.monitoring.sketches import CATEGORY_LIMIT, FeatureSketch
from falaj.records.quantiles.kll import Floats, Points

BINS = 10
MIN_EXPECTED_ROWS = 40
"""Minimum expected rows per bin and sample. Five are customary at the level 0.05. At 0.0001, which results from many
columns and windows, PSI raises up to 3 times too many alarms with 10 rows, and up to 1.4 times with 40 (simulated);
the conservative KS test, which gets half of the column's level, compensates for that."""
CATEGORY_BINS = 50


@dataclass(frozen=True)
class Bins:
    """Rows per bin: of the reference in `old`, of the window in `new`."""

    old: Floats
    new: Floats

    def __len__(self) -> int:
        return len(self.old)

    @property
    def unit(self) -> float:
        """1/n + 1/m."""
        return float(1 / self.old.sum() + 1 / self.new.sum())

    def shares(self) -> tuple[Floats, Floats]:
        return self.old / self.old.sum(), self.new / self.new.sum()

    def smoothed_shares(self) -> tuple[Floats, Floats]:
        return Bins(self.old + 0.5, self.new + 0.5).shares()

    def pooled_shares(self) -> Floats:
        together: Floats = self.old + self.new
        shares: Floats = together / together.sum()
        return shares

    def expected(self) -> Floats:
        """Return the rows of the smaller sample expected in each bin under no drift."""
        rows: Floats = self.pooled_shares() * min(self.old.sum(), self.new.sum())
        return rows

    def join(self, first: int, second: int) -> Bins:
        """Return the bins with the second merged into the first."""
        counts = np.stack([self.old, self.new])
        counts[:, first] += counts[:, second]
        return Bins(*np.delete(counts, second, axis=1))


def reference_edges(old: Points) -> Floats:
    """Return the distinct deciles of the reference, which separate the bins of numbers."""
    edges: Floats = np.unique(old.quantiles(np.arange(1, BINS) / BINS))
    return edges


def bin_numbers(
    old: Points, new: Points, *, nulls: tuple[int, int], least: float = MIN_EXPECTED_ROWS
) -> Bins:
    """Bin numbers by quantiles of the reference, with `least` expected rows each; nulls form one more bin."""
    if old.count and new.count:
        edges = reference_edges(old)
        counted = [
            np.diff(points.at_or_below(edges), prepend=0, append=points.count) for points in (old, new)
        ]
    else:
        counted = [np.array([float(points.count)] if old.count or new.count else []) for points in (old, new)]
    total = old.count + nulls[0], new.count + nulls[1]
    bins = _merge_small_bins(Bins(*counted), total=total, least=least)
    return _with_remainder(bins, *nulls)


def bin_categories(
    reference: FeatureSketch, window: FeatureSketch, *, least: float = MIN_EXPECTED_ROWS
) -> Bins:
    """Bin categories: one bin per frequent category, one for the others, one for nulls."""
    known = known_to_both(reference, window)
    counts = [np.array([float(side.categories.get(c, 0)) for c in known]) for side in (reference, window)]
    every = Bins(*counts)
    sizes = (reference.rows, window.rows)
    frequent = (every.old + every.new) * min(sizes) / sum(sizes) >= least
    frequent &= np.arange(len(known)) < CATEGORY_BINS
    kept = Bins(every.old[frequent], every.new[frequent])
    others = reference.count - kept.old.sum(), window.count - kept.new.sum()
    return _with_remainder(_with_remainder(kept, *others), reference.nulls, window.nulls)


def known_to_both(reference: FeatureSketch, window: FeatureSketch) -> list[str]:
    """Return the categories with exact counts in both sketches, most frequent first."""
    together = {
        category: reference.categories.get(category, 0) + window.categories.get(category, 0)
        for category in reference.categories.keys() | window.categories.keys()
    }
    for side in (reference, window):
        if len(side.categories) == CATEGORY_LIMIT and side.other:
            last = max(map(category_hash, side.categories))
            together = {category: n for category, n in together.items() if category_hash(category) <= last}
    return sorted(together, key=lambda category: (-together[category], category))


def _merge_small_bins(bins: Bins, *, total: tuple[int, int], least: float) -> Bins:
    """Merge each bin with too few expected rows with its smaller neighbour, smallest bin first."""
    while len(bins) > 2 or (len(bins) == 2 and least <= MIN_EXPECTED_ROWS):
        together = bins.old + bins.new
        smallest = int(together.argmin())
        if together[smallest] * min(total) / sum(total) >= least:
            break
        sides = [side for side in (smallest - 1, smallest + 1) if 0 <= side < len(bins)]
        neighbour = min(sides, key=lambda side: float(together[side]))
        bins = bins.join(*sorted((smallest, neighbour)))
    return bins


def _with_remainder(bins: Bins, old: float, new: float) -> Bins:
    """Add a bin for the remaining rows, or add them to the smallest bin if they are few.

    For rows that the reference lacks, the expected number is low however many come; enough observed rows suffice.
    """
    more = Bins(np.append(bins.old, float(old)), np.append(bins.new, float(new)))
    if old + new == 0 or len(bins) == 0:
        return bins if old + new == 0 else more
    if more.expected()[-1] >= MIN_EXPECTED_ROWS or min(
        more.old.sum(), more.new.sum()
    ) >= MIN_EXPECTED_ROWS <= max(old, new):
        return more
    return more.join(int((bins.old + bins.new).argmin()), len(bins))
