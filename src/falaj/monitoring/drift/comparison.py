"""Compare two sketches of one column: PSI and KS for numbers, PSI and chi-square for categories.

Under no drift, PSI over B bins is about (1/n + 1/m) · χ²(B-1), so its threshold follows from the sample sizes and the
false-alarm level instead of the customary 0.1 and 0.25. Every threshold includes the error of the sketches.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import erfc, exp, inf, lgamma, log, sqrt
from statistics import NormalDist

import numpy as np

from falaj.errors import InvalidInput
from falaj.monitoring.drift.bins import MIN_EXPECTED_ROWS, Bins, bin_categories, bin_numbers
from falaj.monitoring.sketches.kll import TAIL, Points, read_points
from falaj.records.monitoring.sketches import ColumnKind, FeatureSketch, Statistic

MINIMUM_ROWS = 2 * MIN_EXPECTED_ROWS
"""Two bins, the minimum for a comparison, with `MIN_EXPECTED_ROWS` each."""
TWO_SIDED_99 = NormalDist().inv_cdf(0.995)
TESTS_PER_COLUMN = 2


@dataclass(frozen=True)
class ChiSquareTest:
    """A distance that is `scale` · χ²(`dof`) under no drift; `unit` scales the reported value."""

    statistic: Statistic
    distance: float
    scale: float
    dof: int
    unit: float = 1.0

    @property
    def value(self) -> float:
        return self.distance / self.unit

    @property
    def p_value(self) -> float:
        return chi_square_tail(self.distance / self.scale, self.dof)

    @property
    def effect(self) -> float:
        """The distance beyond its mean under no drift, as a shift: a normal shift by d has a divergence of d²."""
        return sqrt(max(0.0, self.distance - self.scale * self.dof))

    def threshold(self, level: float) -> float:
        return self.scale * chi_square_critical(level, self.dof) / self.unit

    def method(self, level: float) -> str:
        of = "(1/n + 1/m + sketch error)" if self.statistic is Statistic.PSI else "1"
        return f"{of} · χ²({self.dof}) at level {level:.2g}"


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

    @property
    def p_value(self) -> float:
        return min(1.0, 2 * exp(-((self.value / self.width) ** 2)))

    @property
    def effect(self) -> float:
        """The value as a normal shift d, whose KS distance is 2Φ(d/2) - 1."""
        beyond = min(max(0.0, self.value - self.sketch_error), 1 - 1e-9)
        return 2 * NormalDist().inv_cdf((1 + beyond) / 2)

    def threshold(self, level: float) -> float:
        return self.width * sqrt(log(2 / level))

    def method(self, level: float) -> str:
        return f"two-sample critical value √(ln(2/α)(n + m)/2nm) plus sketch error, at level {level:.2g}"


Test = ChiSquareTest | KolmogorovTest


@dataclass(frozen=True)
class ColumnComparison:
    """The tests of one column; without tests, `too_few` gives the reason."""

    reference: FeatureSketch
    window: FeatureSketch
    tests: tuple[Test, ...] = ()
    too_few: str = ""

    @property
    def p_value(self) -> float:
        """The p-value of the column: the smallest of its tests, times their number (Bonferroni)."""
        return min(1.0, TESTS_PER_COLUMN * min((test.p_value for test in self.tests), default=inf))


def compare(reference: FeatureSketch, window: FeatureSketch) -> ColumnComparison:
    """Run both tests of a column, if the samples are large enough."""
    if (reference.kind, reference.role) != (window.kind, window.role):
        given = f"{window.kind} {window.role}"
        raise InvalidInput.at(window.name, given=given, allowed=f"{reference.kind} {reference.role}")
    for side, sketch in (("window", window), ("reference", reference)):
        if sketch.rows < MINIMUM_ROWS:
            problem = f"the {side} has {sketch.rows} rows; {MINIMUM_ROWS} are needed"
            return ColumnComparison(reference, window, too_few=problem)
    tests = (_numeric_tests if reference.kind is ColumnKind.NUMERIC else _categorical_tests)(
        reference, window
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


def _numeric_tests(reference: FeatureSketch, window: FeatureSketch) -> tuple[Test, ...]:
    old, new = read_points(reference), read_points(window)
    tests: list[Test] = []
    bins = bin_numbers(old, new, nulls=(reference.nulls, window.nulls))
    if len(bins) >= 2:
        tests.append(_psi(bins, share_errors=(old.share_error, new.share_error)))
    if min(old.count, new.count) >= MINIMUM_ROWS:
        tests.append(_kolmogorov(old, new))
    return tuple(tests)


def _categorical_tests(reference: FeatureSketch, window: FeatureSketch) -> tuple[Test, ...]:
    bins = bin_categories(reference, window)
    return (_psi(bins), _chi_square(bins)) if len(bins) >= 2 else ()


def _psi(bins: Bins, *, share_errors: tuple[float, float] = (0.0, 0.0)) -> ChiSquareTest:
    """Population stability index. Half a row is added to each bin to keep it finite for empty bins."""
    old, new = bins.smoothed_shares()
    distance = float(((new - old) * np.log(new / old)).sum())
    dof = len(bins) - 1
    # A sketch error of σ in each share adds Σ σ²/share to the mean, which is `scale` · `dof`.
    variance = sum((error / TWO_SIDED_99) ** 2 for error in share_errors)
    scale = bins.unit + variance * float((1 / bins.pooled_shares()).sum()) / dof
    return ChiSquareTest(Statistic.PSI, distance, scale, dof)


def _chi_square(bins: Bins) -> ChiSquareTest:
    """Pearson's test that two samples come from one distribution."""
    old, new = bins.shares()
    distance = float(((new - old) ** 2 / bins.pooled_shares()).sum())
    return ChiSquareTest(Statistic.CHI_SQUARE, distance, bins.unit, len(bins) - 1, unit=bins.unit)


def _kolmogorov(old: Points, new: Points) -> KolmogorovTest:
    union = np.concatenate([old.values, new.values])
    distances = np.abs(old.at_or_below(union) / old.count - new.at_or_below(union) / new.count)
    sketch_error = old.rank_error + new.rank_error
    width = sqrt((1 / old.count + 1 / new.count) / 2) + sketch_error / TAIL
    return KolmogorovTest(float(distances.max()), width, sketch_error)


def chi_square_tail(value: float, dof: int) -> float:
    """Return the probability that a chi-square variable exceeds `value`."""
    if value <= 0:
        return 1.0
    half = value / 2
    tail, order = (exp(-half), 1.0) if dof % 2 == 0 else (erfc(sqrt(half)), 0.5)
    while order < dof / 2:  # Q(a + 1, x) = Q(a, x) + x^a e^-x / Γ(a + 1)
        tail += exp(order * log(half) - half - lgamma(order + 1))
        order += 1
    return min(1.0, tail)


def chi_square_critical(level: float, dof: int) -> float:
    """Return the value that a chi-square variable exceeds with probability `level`."""
    low, high = 0.0, dof + 10.0
    while chi_square_tail(high, dof) > level:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, dof) > level else (low, middle)
    return high
