"""Drift: statistics against exact values, false alarms and power by simulation, and the messages."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from math import sqrt
from typing import Any

import numpy as np
import pytest
from scipy import stats

from falaj.errors import InvalidInput
from falaj.monitoring.drift.comparison import MINIMUM_ROWS, compare
from falaj.monitoring.drift.distributions import chi_square_critical, chi_square_tail, f_tail
from falaj.monitoring.drift.verdicts import conventional_psi_class, detect_drift
from falaj.monitoring.sketches.sketchers import WindowSketcher, sketch_column, sketch_reference
from falaj.records.monitoring.sketches import (
    ColumnKind,
    DriftVerdict,
    FalseAlarmBudget,
    FeatureSketch,
    ModelDrift,
    RowDependence,
    Statistic,
    WindowSketch,
)
from falaj.records.quantiles.kll import RANK_ERROR

NOON = datetime(2013, 7, 1, 12, tzinfo=UTC)
WINDOWS = 400
ONE_LOOK = FalseAlarmBudget(alpha=0.05, looks=1, dependence=RowDependence.NONE)
THIRTY_LOOKS = FalseAlarmBudget(dependence=RowDependence.NONE)
"""The references here have no times: their rows are independent."""


def numeric(values: Any) -> FeatureSketch:
    return sketch_column("x", [np.asarray(values, dtype=np.float64)], kind=ColumnKind.NUMERIC)


def categorical(values: Any) -> FeatureSketch:
    return sketch_column("x", [np.asarray(values)], kind=ColumnKind.CATEGORICAL)


def window(columns: Mapping[str, Any]) -> WindowSketch:
    kinds = {
        name: ColumnKind.CATEGORICAL if np.asarray(v).dtype.kind in "UbO" else ColumnKind.NUMERIC
        for name, v in columns.items()
    }
    sketcher = WindowSketcher("delay@3", features=kinds)
    sketcher.update(columns)
    return sketcher.cut(since=NOON, until=NOON + timedelta(hours=1))


def judged(
    before: Mapping[str, Any], now: Mapping[str, Any], budget: FalseAlarmBudget = THIRTY_LOOKS
) -> ModelDrift:
    return detect_drift(sketch_reference("flights@1", [before]), window(now), budget=budget)


def flights(rng: np.random.Generator, rows: int, *, shift: float = 0.0) -> dict[str, Any]:
    """Return columns of several shapes; only `distance` moves with `shift`."""
    return {
        "distance": rng.normal(shift, 1, rows),
        "delay": rng.exponential(10, rows),
        "seats": rng.poisson(3, rows),
        "partly": np.where(rng.random(rows) < 0.1, np.nan, rng.normal(size=rows)),
        "carrier": rng.choice(list("abcdefgh"), rows, p=[0.4, 0.2, 0.15, 0.1, 0.1, 0.03, 0.01, 0.01]),
        "late": rng.random(rows) < 0.2,
    }


# ---------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("dof", [1, 2, 3, 9, 10, 49, 200])
def test_tails_agree_with_scipy(dof: int) -> None:
    for value in (0.1, 1.0, 5.0, 40.0, 300.0):
        assert chi_square_tail(value, dof) == pytest.approx(stats.chi2.sf(value, dof), rel=1e-9, abs=1e-300)
        for tail in (3.5, 40.0, 1e5):
            assert f_tail(value, dof, tail) == pytest.approx(
                stats.f.sf(value, dof, tail), rel=1e-6, abs=1e-12
            )
    for level in (0.5, 0.05, 1e-4, 1e-9):
        assert chi_square_critical(level, dof) == pytest.approx(stats.chi2.isf(level, dof), rel=1e-9)


@pytest.mark.parametrize("rows", [300, 5_000, 100_000])
@pytest.mark.parametrize("shift", [0.0, 0.3, 5.0])
def test_ks_is_exact_up_to_the_error_of_the_sketches(rows: int, shift: float) -> None:
    rng = np.random.default_rng(1)
    before, now = rng.normal(size=rows), rng.normal(shift, 1, rows)

    ks = next(test for test in compare(numeric(before), numeric(now)).tests if test.statistic is Statistic.KS)

    tolerance = 1e-12 if rows < 800 else 2.5 * RANK_ERROR
    assert ks.value == pytest.approx(stats.ks_2samp(before, now).statistic, abs=tolerance)


def test_chi_square_agrees_with_scipy() -> None:
    rng = np.random.default_rng(2)
    before, now = rng.choice(list("abc"), 3_000), rng.choice(list("abc"), 2_000, p=[0.3, 0.3, 0.4])

    test = compare(categorical(before), categorical(now)).tests[1]

    table = [[(side == name).sum() for name in "abc"] for side in (before, now)]
    exact = stats.chi2_contingency(table, correction=False)
    assert (test.value, test.p_value) == pytest.approx((exact.statistic, exact.pvalue))


def test_psi_agrees_with_its_definition() -> None:
    rng = np.random.default_rng(3)
    before, now = rng.normal(size=50_000), rng.normal(0.5, 1, 50_000)

    psi = compare(numeric(before), numeric(now)).tests[0]

    edges = np.quantile(before, np.arange(1, 10) / 10)
    shares = [
        np.diff(np.searchsorted(np.sort(side), edges), prepend=0, append=50_000) / 50_000
        for side in (before, now)
    ]
    exact = ((shares[1] - shares[0]) * np.log(shares[1] / shares[0])).sum()
    assert psi.value == pytest.approx(exact, rel=0.1)
    assert psi.effect == pytest.approx(0.5, abs=0.05)  # Cohen's d of the shift


# -------------------------------------------------------------------------------- false alarms, power


@pytest.mark.slow
@pytest.mark.parametrize(("reference_rows", "window_rows"), [(2_000, 2_000), (50_000, 400), (300, 300)])
def test_without_drift_false_alarms_stay_within_the_budget(reference_rows: int, window_rows: int) -> None:
    rng = np.random.default_rng(4)
    references = [sketch_reference("flights@1", [flights(rng, reference_rows)]) for _ in range(20)]

    alarms, before_the_floor = 0, 0
    for number in range(WINDOWS):
        reference, now = references[number % 20], window(flights(rng, window_rows))
        alarms += detect_drift(reference, now, budget=ONE_LOOK).verdict is DriftVerdict.DRIFT
        smallest = min(compare(*pair).p_value for pair in zip(reference.features, now.features, strict=True))
        before_the_floor += smallest * len(now.features) <= ONE_LOOK.alpha

    allowed = WINDOWS * 0.05 + 3 * sqrt(WINDOWS * 0.05 * 0.95)
    assert alarms <= before_the_floor <= allowed


def test_sketching_error_alone_raises_no_alarm() -> None:
    rng = np.random.default_rng(5)
    rows = rng.normal(size=400_000)

    p_values = [compare(numeric(rows), numeric(rng.permutation(rows))).p_value for _ in range(20)]

    assert min(p_values) > 0.05


@pytest.mark.parametrize("reference_rows", [2_000, 50_000])
def test_a_shift_of_three_tenths_of_a_deviation_is_found(reference_rows: int) -> None:
    rng = np.random.default_rng(6)

    references = [sketch_reference("flights@1", [flights(rng, reference_rows)]) for _ in range(10)]

    looks = [
        detect_drift(references[n % 10], window(flights(rng, 2_000, shift=0.3)), budget=THIRTY_LOOKS)
        for n in range(100)
    ]

    found = sum("distance" in [report.name for report in look.drifted] for look in looks)
    wrong = sum(len([report for report in look.drifted if report.name != "distance"]) for look in looks)
    assert found >= 95
    assert wrong <= 1


def test_with_very_many_rows_a_meaningless_difference_is_no_alarm() -> None:
    rng = np.random.default_rng(7)

    look = judged({"x": rng.normal(size=1_000_000)}, {"x": rng.normal(0.05, 1, 1_000_000)})

    assert look.verdict is DriftVerdict.NONE
    assert look.reports[0].evidence[1].p_value < 1e-4
    assert "less than a small effect" in look.reports[0].words


# --------------------------------------------------------------------------------------- edge cases


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (np.zeros(1_000), np.zeros(1_000), DriftVerdict.NONE),
        (np.zeros(1_000), np.ones(1_000), DriftVerdict.DRIFT),
        (np.zeros(1_000), -np.ones(1_000), DriftVerdict.DRIFT),
        (np.ones(1_000), np.full(1_000, np.nan), DriftVerdict.DRIFT),
        (np.full(1_000, np.nan), np.full(1_000, np.nan), DriftVerdict.NONE),
        (
            np.arange(1_000.0),
            np.where(np.arange(1_000) < 200, np.nan, np.arange(1_000.0)),
            DriftVerdict.DRIFT,
        ),
        (
            np.arange(1_000.0),
            np.where(np.arange(1_000) < 200, np.inf, np.arange(1_000.0)),
            DriftVerdict.DRIFT,
        ),
        (np.arange(1_000.0), np.arange(1_000.0), DriftVerdict.NONE),
        (np.arange(1_000) + 2**60, np.arange(1_000) + 2**61, DriftVerdict.DRIFT),
        (np.array([]), np.ones(1_000), DriftVerdict.TOO_FEW),
        (np.ones(1_000), np.ones(MINIMUM_ROWS - 1), DriftVerdict.TOO_FEW),
        (np.ones(1_000), np.zeros(1), DriftVerdict.TOO_FEW),
        (np.array(["a", "b"] * 500), np.array(["a", "b"] * 500), DriftVerdict.NONE),
        (np.array(["a", "b"] * 500), np.array(["a", "c"] * 500), DriftVerdict.DRIFT),
        (np.array(["a"] * 1_000), np.array(["a"] * 1_000), DriftVerdict.NONE),
        (np.array(["a"] * 99 + ["b"]), np.array(["a"] * 98 + ["b"] * 2), DriftVerdict.TOO_FEW),
        (np.array(["a"] * 1_000), np.array(["b"] * 1_000), DriftVerdict.DRIFT),
        (np.array(["a"] * 900_000), np.array(["a", "a", "a", "a", "b"] * 200), DriftVerdict.DRIFT),
        (
            np.array(["a", "b"] * 500, object),
            np.array([None, "a", "b", "b"] * 250, object),
            DriftVerdict.DRIFT,
        ),
        (np.array([True, False] * 500), np.array([True] * 1_000), DriftVerdict.DRIFT),
    ],
)
def test_edge_case_samples_get_the_right_verdict(before: Any, now: Any, verdict: DriftVerdict) -> None:
    look = judged({"x": before}, {"x": now})

    assert look.verdict is verdict, look.reports[0].words
    assert look.reports[0].words.startswith("x ")
    assert ModelDrift.model_validate_json(look.model_dump_json()) == look


def test_many_categories_beyond_the_limit_cause_no_alarm() -> None:
    rng = np.random.default_rng(8)

    looks = [
        judged(
            {"x": rng.integers(0, 3_000, 20_000).astype(str)}, {"x": rng.integers(0, 3_000, 900).astype(str)}
        )
        for _ in range(20)
    ]

    assert [look.verdict for look in looks if look.verdict is DriftVerdict.DRIFT] == []


def test_a_column_that_changed_its_kind_is_refused() -> None:
    with pytest.raises(InvalidInput, match="x is not valid"):
        compare(numeric(np.ones(100)), categorical(np.array(["a"] * 100)))


# ------------------------------------------------------------------------------------------ messages


def test_drifted_columns_come_first_the_largest_effect_on_top() -> None:
    rng = np.random.default_rng(9)
    names = ["calm", "some", "much"]
    before = {name: rng.normal(size=5_000) for name in names}
    now = {name: rng.normal(shift, 1, 3_000) for name, shift in zip(names, (0, 0.5, 2), strict=True)}

    look = judged(before | {"gone": np.ones(100)}, now | {"new": np.ones(100)})

    assert [report.name for report in look.reports] == ["much", "some", "calm", "gone", "new"]
    assert look.words == "delay@3: 2 of 3 columns drift: much, some"
    assert look.reports[3].words == "gone was not evaluated: it is not in the window"
    assert look.reports[0].effect == pytest.approx(2, rel=0.15)
    assert (look.reports[0].window_rows, look.reports[0].reference_rows) == (3_000, 5_000)


def test_no_drift_is_reported_as_text() -> None:
    rng = np.random.default_rng(10)

    assert judged(flights(rng, 3_000), flights(rng, 3_000)).words == "delay@3: no drift in 6 columns"
    assert (
        judged({"x": np.ones(9)}, {"x": np.ones(9)}).words
        == "delay@3: too few rows to evaluate any of 1 columns"
    )


def test_psi_classes_are_labels_only() -> None:
    assert [conventional_psi_class(psi) for psi in (0.05, 0.2, 0.3)] == ["stable", "moderate", "large"]


def test_a_larger_number_of_planned_tests_raises_the_threshold() -> None:
    rng = np.random.default_rng(11)
    before, now = flights(rng, 1_000), flights(rng, 1_000)

    one, many = (
        judged(before, now, budget=THIRTY_LOOKS.model_copy(update={"looks": looks})) for looks in (1, 1_000)
    )

    by_name = {report.name: report for report in many.reports}
    for report in one.reports:
        for short, long in zip(report.evidence, by_name[report.name].evidence, strict=True):
            assert long.threshold > short.threshold
