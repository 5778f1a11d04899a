"""The dependence of rows: estimated from blocks of time, within the budget of false alarms, and said where unknown."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pyarrow as pa
import pytest

from dependent_streams import DAY_S, StreamMaker, cut, pinned, pinned_columns
from falaj.monitoring.drift.dependence import MIN_BLOCKS, excess_of, measure_spread, spread_within
from falaj.monitoring.drift.verdicts import detect_drift
from falaj.monitoring.monitors import time_column
from falaj.monitoring.sketches.sketchers import sketch_reference
from falaj.records.monitoring.sketches import (
    DriftVerdict,
    FalseAlarmBudget,
    FeatureSketch,
    ModelDrift,
    ReferenceSketch,
    RowDependence,
)

REFERENCE_DAYS = 40
AS_INDEPENDENT = FalseAlarmBudget(dependence=RowDependence.NONE)
DEPENDENT = [("days", 0.3), ("autoregressive", 1.0), ("bursts", 0.0)]


def alarms(
    maker: StreamMaker, *, looks: int, shift: float = 0.0, budget: FalseAlarmBudget | None = None
) -> int:
    """Return how many of `looks` windows of a day alarm, after a reference of 40 days of the same stream."""
    stream = maker.make(REFERENCE_DAYS + looks)
    reference = pinned(stream.between(0, REFERENCE_DAYS))
    windows = [
        cut(stream, day, day + 1, shift=shift) for day in range(REFERENCE_DAYS, REFERENCE_DAYS + looks)
    ]
    return sum(detect_drift(reference, each, budget=budget).verdict is DriftVerdict.DRIFT for each in windows)


@pytest.mark.parametrize(("kind", "strength"), DEPENDENT)
def test_dependent_rows_without_drift_keep_the_budget(kind: str, strength: float) -> None:
    found = alarms(StreamMaker(kind, strength), looks=30)
    before = alarms(StreamMaker(kind, strength), looks=30, budget=AS_INDEPENDENT)

    assert found == 0
    assert before >= 10  # the same windows, taken as independent rows


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strength"), [("none", 0.0), ("days", 0.1), *DEPENDENT])
def test_false_alarms_of_many_monitors_stay_within_the_budget(kind: str, strength: float) -> None:
    maker = StreamMaker(kind, strength, rows=500)

    monitors = [alarms(maker, looks=30) > 0 for _ in range(40)]

    assert sum(monitors) <= 6  # 5 % of 40 are 2; more than 6 have a chance of 0.3 %


@pytest.mark.parametrize(
    ("kind", "strength", "shift"), [("none", 0.0, 0.3), ("days", 0.1, 1.0), ("bursts", 0.0, 1.5)]
)
def test_real_shifts_are_found(kind: str, strength: float, shift: float) -> None:
    assert alarms(StreamMaker(kind, strength), looks=10, shift=shift) >= 9


def test_a_longer_window_finds_what_a_day_cannot() -> None:
    stream = StreamMaker("days", 0.3).make(150)
    reference = pinned(stream.between(0, 120))

    day, weeks = (
        detect_drift(reference, cut(stream, 120, 120 + days, shift=0.8), budget=None) for days in (1, 28)
    )

    assert (day.verdict, weeks.verdict) == (DriftVerdict.NONE, DriftVerdict.DRIFT)


def test_effective_rows_follow_the_days_that_a_window_has() -> None:
    independent, dependent = (
        only(StreamMaker("days", strength)).reports[0].effective_rows for strength in (0.0, 0.5)
    )

    assert independent is not None
    assert independent > 700
    assert dependent is not None
    assert dependent < 100


def only(maker: StreamMaker) -> ModelDrift:
    stream = maker.make(REFERENCE_DAYS + 1)
    return detect_drift(
        pinned(stream.between(0, REFERENCE_DAYS)), cut(stream, REFERENCE_DAYS, REFERENCE_DAYS + 1)
    )


def test_a_reference_without_times_judges_medium_effects_only_and_says_so() -> None:
    stream = StreamMaker("none").make(3)
    reference = sketch_reference("flights@1", [{"x": stream.between(0, 2).values}])

    small, medium = (detect_drift(reference, cut(stream, 2, 3, shift=shift)) for shift in (0.3, 0.8))

    assert (small.verdict, medium.verdict) == (DriftVerdict.NONE, DriftVerdict.DRIFT)
    assert "differs by less than a medium effect" in small.reports[0].words
    assert "how rows depend on each other cannot be judged" in small.reports[0].words
    assert small.reports[0].effective_rows is None


def test_too_few_blocks_or_rows_show_no_spread() -> None:
    maker = StreamMaker("days", 0.5, rows=50)

    snapshot = pinned_columns(np.zeros(2_000), {"x": maker.make(40).values[:2_000]})
    sparse = pinned(StreamMaker("days", 0.5, rows=1).make(60))

    assert snapshot.spreads == {"x": ()}
    assert sparse.spreads == {"x": ()}
    assert measure_spread(np.full((MIN_BLOCKS - 1, 4), 500), span_s=DAY_S, ordered=4) is None
    assert measure_spread(np.full((MIN_BLOCKS, 4), 500), span_s=DAY_S, ordered=4) is not None


def test_a_spread_in_one_direction_has_one_dimension() -> None:
    counts = np.random.default_rng(6990).integers(
        200, 800, size=(12, 2)
    )  # its quotient is 1 less a rounding error

    spread = measure_spread(counts, span_s=DAY_S, ordered=2)

    assert spread is not None
    assert spread.dimensions == 1.0


def test_the_spread_of_a_shorter_window_is_larger() -> None:
    spreads = pinned(StreamMaker("autoregressive", 1.0).make(REFERENCE_DAYS)).spreads["x"]

    by_span = [
        excess_of(spreads, timedelta(minutes=minutes)).shares for minutes in (1, 60, 24 * 60, 7 * 24 * 60)
    ]

    assert by_span[1:] == sorted(by_span[1:], reverse=True)
    assert by_span[0] > 0.9 * by_span[1] > 1.8 * by_span[3]


def test_a_reference_with_few_rows_is_extrapolated_to_shorter_windows() -> None:
    dense, sparse = (
        pinned(StreamMaker("days", 0.7, rows=rows).make(90)).spreads["x"] for rows in (1_000, 30)
    )

    assert min(each.span_s for each in sparse) == 7 * DAY_S  # a day has too few pairs of rows
    of_day = [excess_of(each, timedelta(days=1)).shares for each in (dense, sparse)]
    assert 0.5 * of_day[0] < of_day[1] < 5 * of_day[0]


def test_bursts_within_a_window_are_seen_in_its_parts() -> None:
    """A training set with a row per customer does not show that requests repeat them."""
    rng = np.random.default_rng(5)
    reference = sketch_reference("flights@1", [{"x": rng.normal(size=20_000)}])

    def parts(repeated: int) -> list[FeatureSketch]:
        values = np.repeat(rng.normal(size=2_000 // repeated), repeated)
        return [sketch_reference("part", [{"x": each}]).features[0] for each in np.split(values, 20)]

    alone = spread_within(reference.features[0], parts(1))
    bursts = spread_within(reference.features[0], parts(20))

    assert alone is not None
    assert bursts is not None
    assert bursts.shares > 10 * alone.shares
    assert excess_of((), timedelta(hours=1), within=bursts).shares == pytest.approx(
        bursts.shares / bursts.blocks
    )


def test_categories_and_nulls_have_blocks_as_well() -> None:
    rng = np.random.default_rng(6)
    times = np.sort(rng.random(40_000) * 40 * DAY_S)
    by_day = rng.random(40)[(times // DAY_S).astype(int)]
    carrier = pa.array(np.where(rng.random(40_000) < by_day, "a", "b").astype(object))
    partly = np.where(rng.random(40_000) < by_day / 2, np.nan, rng.normal(size=40_000))

    spreads = pinned_columns(times, {"carrier": carrier, "partly": partly}).spreads

    day = {name: next(each for each in found if each.span_s == DAY_S) for name, found in spreads.items()}
    assert day["carrier"].shares == pytest.approx(by_day.var() / 0.25, rel=0.3)
    assert day["partly"].shares > 0.05
    assert day["partly"].ranks < 0.001  # values themselves do not follow the days


def test_spreads_survive_storage() -> None:
    reference = pinned(StreamMaker("days", 0.5).make(20))

    assert ReferenceSketch.model_validate_json(reference.model_dump_json()) == reference


def test_the_times_of_rows_are_found_by_name_or_type() -> None:
    moment = pa.timestamp("us", tz="UTC")

    assert time_column({"event_time": moment, "created_time": moment}) == "event_time"
    assert time_column({"at": moment, "x": pa.float64()}) == "at"
    assert time_column({"at": moment, "created": moment}) is None
    assert time_column({"event_time": pa.string()}) is None
