"""Compare two sketches of one column: PSI and KS for numbers, PSI and chi-square for categories.

Under no drift, PSI over B bins is about (1/n + 1/m) · χ²(B-1), so its threshold follows from the sample sizes and the
false-alarm level instead of the customary 0.1 and 0.25. Every threshold includes the error of the sketches, and the
variance that rows have in excess because they depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, log, sqrt
from statistics import NormalDist

import numpy as np

from falaj.errors import InvalidInput
from falaj.monitoring.drift.bins import BINS, MIN_EXPECTED_ROWS, Bins, bin_categories, bin_numbers
from falaj.monitoring.drift.dependence import INDEPENDENT, Excess
from falaj.monitoring.drift.distributions import chi_square_critical, chi_square_tail, critical, f_tail
from falaj.monitoring.sketches.reading import read_points
from falaj.records.monitoring.sketches import ColumnKind, FeatureSketch, Statistic
from falaj.records.quantiles.kll import TAIL, Points

MINIMUM_ROWS = 2 * MIN_EXPECTED_ROWS
"""Two bins, the minimum for a comparison, with `MIN_EXPECTED_ROWS` each."""
TWO_SIDED_99 = NormalDist().inv_cdf(0.995)
TESTS_PER_COLUMN = 2
MIN_EFFECTIVE_ROWS = 20
"""The same for independent rows that vary like those of a bin; the tail is longer than normal there already."""
LONGEST_TAIL = 1e5
"""Degrees of freedom beyond which a tail is as good as normal."""


@dataclass(frozen=True)
class ChiSquareTest:
    """A distance that is `scale` · χ²(`dof`) under no drift and independent rows; `unit` scales the reported value.

    Dependence adds the `excess` to its mean, in some directions only, and with a longer tail.
    """

    statistic: Statistic
    distance: float
    scale: float
    dof: int
    unit: float = 1.0
    excess: Excess = INDEPENDENT

    @property
    def value(self) -> float:
        return self.distance / self.unit

    @property
    def p_value(self) -> float:
        return self._tail(self.distance)

    @property
    def mean(self) -> float:
        """The mean distance under no drift."""
        return self.scale * self.dof + self._beyond

    @property
    def _beyond(self) -> float:
        """The part of the mean that is due to dependence: merged bins have as many directions as they have left."""
        return min(self.excess.shares, self.dof * self.excess.largest)

    @property
    def effect(self) -> float:
        """The distance beyond its mean under no drift, as a shift: a normal shift by d has a divergence of d²."""
        return sqrt(max(0.0, self.distance - self.mean))

    def threshold(self, level: float) -> float:
        if not self._beyond:
            found = self.scale * chi_square_critical(level, self.dof)
        else:
            found = critical(self._tail, level, start=10 * self.mean)
        return found / self.unit

    def method(self, level: float) -> str:
        of = "(1/n + 1/m + sketch error)" if self.statistic is Statistic.PSI else "1"
        more = "" if not self._beyond else ", widened by the dependence of rows"
        return f"{of} · χ²({self.dof}) at level {level:.2g}{more}"

    def _tail(self, distance: float) -> float:
        """Return the probability of `distance` or more under no drift."""
        excess, scale, beyond = self.excess, self.scale, self._beyond
        if not beyond:
            return chi_square_tail(distance / scale, self.dof)
        dimensions = min(excess.dimensions, float(self.dof))
        found = max(
            self._f_tail(distance, self.dof, scale + beyond / self.dof),
            self._f_tail(distance - scale * (self.dof - dimensions), dimensions, scale + beyond / dimensions),
            self._f_tail(distance - self.mean + scale + excess.largest, 1, scale + excess.largest),
        )
        is_farthest = distance - scale * self.dof > excess.farthest_shares
        return found if is_farthest else max(found, 1 / (1 + excess.blocks))

    def _f_tail(self, distance: float, dof: float, variance: float) -> float:
        """Return the tail of `variance` · χ²(`dof`), of which what exceeds `scale` was estimated from blocks."""
        tail = self.excess.shares_tail * (variance / max(variance - self.scale, 1e-300)) ** 2
        return f_tail(distance / (variance * dof), dof, min(tail, LONGEST_TAIL))


@dataclass(frozen=True)
class KolmogorovTest:
    """The largest difference of two distribution functions; P(value > t · `width`) ≤ 2·exp(-t²) under no drift.

    `width` adds the deviations of the samples (Dvoretzky-Kiefer-Wolfowitz) and of the sketches, so that the error
    of the sketches alone does not exceed the threshold.
    """

    value: float
    width: float
    sketch_error: float
    statistic: Statistic = Statistic.KS
    excess: Excess = INDEPENDENT

    @property
    def p_value(self) -> float:
        scaled = (self.value / self.width) ** 2
        tail = self._tail_dof()
        found = 2 * (exp(-scaled) if tail == inf else (1 + 2 * scaled / tail) ** (-tail / 2))
        is_farthest = self.value > self.excess.farthest_ranks or not self.excess.ranks
        return min(1.0, found if is_farthest else max(found, 1 / (1 + self.excess.blocks)))

    @property
    def effect(self) -> float:
        """The value as a normal shift d, whose KS distance is 2Φ(d/2) - 1."""
        usual = self.sketch_error + sqrt(self.excess.ranks)
        beyond = min(max(0.0, self.value - usual), 1 - 1e-9)
        return 2 * NormalDist().inv_cdf((1 + beyond) / 2)

    def threshold(self, level: float) -> float:
        tail = self._tail_dof()
        scaled = log(2 / level) if tail == inf else tail / 2 * ((2 / level) ** (2 / tail) - 1)
        found = self.width * sqrt(scaled)
        bound = self.excess.ranks and 1 / (1 + self.excess.blocks) > level
        return max(found, self.excess.farthest_ranks) if bound else found

    def method(self, level: float) -> str:
        more = "" if not self.excess.ranks else ", widened by the dependence of rows"
        return (
            f"two-sample critical value √(ln(2/α)(n + m)/2nm) plus sketch error, at level {level:.2g}{more}"
        )

    def _tail_dof(self) -> float:
        """Return the degrees of freedom of the tail; infinite if the rows are independent."""
        if not self.excess.ranks:
            return inf
        return min(self.excess.ranks_tail * (self.width**2 / (2 * self.excess.ranks)) ** 2, LONGEST_TAIL)


Test = ChiSquareTest | KolmogorovTest


@dataclass(frozen=True)
class ColumnComparison:
    """The tests of one column; without tests, `too_few` gives the reason."""

    reference: FeatureSketch
    window: FeatureSketch
    tests: tuple[Test, ...] = ()
    too_few: str = ""

    @property
    def effective_rows(self) -> int:
        """Return how many independent rows of a window would vary as much."""
        rows = self.window.rows
        shrunk = [test.scale * test.dof / test.mean for test in self.tests if isinstance(test, ChiSquareTest)]
        return max(1, round(rows * min(shrunk, default=1.0)))

    @property
    def p_value(self) -> float:
        """The p-value of the column: the smallest of its tests, times their number (Bonferroni)."""
        return min(1.0, TESTS_PER_COLUMN * min((test.p_value for test in self.tests), default=inf))


def compare(
    reference: FeatureSketch, window: FeatureSketch, excess: Excess = INDEPENDENT
) -> ColumnComparison:
    """Run both tests of a column, if the samples are large enough; `excess` is due to the dependence of rows."""
    if (reference.kind, reference.role) != (window.kind, window.role):
        given = f"{window.kind} {window.role}"
        raise InvalidInput.at(window.name, given=given, allowed=f"{reference.kind} {reference.role}")
    for side, sketch in (("window", window), ("reference", reference)):
        if sketch.rows < MINIMUM_ROWS:
            problem = f"the {side} has {sketch.rows} rows; {MINIMUM_ROWS} are needed"
            return ColumnComparison(reference, window, too_few=problem)
    tests = (_numeric_tests if reference.kind is ColumnKind.NUMERIC else _categorical_tests)(
        reference, window, excess
    )
    if not tests and _groups(reference) == _groups(window) and len(_groups(window)) == 1:
        tests = (ChiSquareTest(Statistic.PSI, 0.0, 1 / reference.rows + 1 / window.rows, dof=1),)
    problem = "" if tests else "fewer than two groups have enough rows to be compared"
    return ColumnComparison(reference, window, tests, problem)


def _groups(sketch: FeatureSketch) -> set[str | None]:
    """Return the distinct groups of rows, nulls as None; a single common group cannot drift."""
    values = (
        set(sketch.categories)
        if sketch.kind is ColumnKind.CATEGORICAL
        else {"values"}
        if sketch.count
        else set()
    )
    return values | ({None} if sketch.nulls else set())


def _numeric_tests(reference: FeatureSketch, window: FeatureSketch, excess: Excess) -> tuple[Test, ...]:
    old, new = read_points(reference), read_points(window)
    tests: list[Test] = []
    least = _least_rows(window, excess)
    bins = bin_numbers(old, new, nulls=(reference.nulls, window.nulls), least=least)
    if len(bins) >= 2:
        tests.append(_psi(bins, excess, share_errors=(old.share_error, new.share_error)))
    if min(old.count, new.count) >= MINIMUM_ROWS:
        tests.append(_kolmogorov(old, new, excess))
    return tuple(tests)


def _categorical_tests(reference: FeatureSketch, window: FeatureSketch, excess: Excess) -> tuple[Test, ...]:
    bins = bin_categories(reference, window, least=_least_rows(window, excess))
    return (_psi(bins, excess), _chi_square(bins, excess)) if len(bins) >= 2 else ()


def _least_rows(window: FeatureSketch, excess: Excess) -> float:
    """Return the least expected rows of a bin: more if rows count for less, since PSI grows fast in bins near zero."""
    counts_for = 1 + window.rows * excess.shares / (BINS - 1)
    return max(MIN_EXPECTED_ROWS, MIN_EFFECTIVE_ROWS * counts_for)


def _psi(bins: Bins, excess: Excess, *, share_errors: tuple[float, float] = (0.0, 0.0)) -> ChiSquareTest:
    """Population stability index. Half a row is added to each bin to keep it finite for empty bins."""
    old, new = bins.smoothed_shares()
    distance = float(((new - old) * np.log(new / old)).sum())
    dof = len(bins) - 1
    # A sketch error of σ in each share adds Σ σ²/share to the mean, which is `scale` · `dof`.
    variance = sum((error / TWO_SIDED_99) ** 2 for error in share_errors)
    scale = bins.unit + variance * float((1 / bins.pooled_shares()).sum()) / dof
    return ChiSquareTest(Statistic.PSI, distance, scale, dof, excess=excess)


def _chi_square(bins: Bins, excess: Excess) -> ChiSquareTest:
    """Pearson's test that two samples come from one distribution."""
    old, new = bins.shares()
    distance = float(((new - old) ** 2 / bins.pooled_shares()).sum())
    return ChiSquareTest(
        Statistic.CHI_SQUARE, distance, bins.unit, len(bins) - 1, unit=bins.unit, excess=excess
    )


def _kolmogorov(old: Points, new: Points, excess: Excess) -> KolmogorovTest:
    union = np.concatenate([old.values, new.values])
    distances = np.abs(old.at_or_below(union) / old.count - new.at_or_below(union) / new.count)
    sketch_error = old.rank_error + new.rank_error
    width = sqrt((1 / old.count + 1 / new.count) / 2 + 2 * excess.ranks) + sketch_error / TAIL
    return KolmogorovTest(float(distances.max()), width, sketch_error, excess=excess)
