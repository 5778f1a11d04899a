"""Points as they are packed, merged in blocks, and thinned out for plots: no point and no peak is lost."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from falaj.errors import InvalidInput, NotFound
from falaj.records.tracking import MetricPoint
from falaj.tracking import metrics
from falaj.tracking.series import Point, pack, thin_out, unpack
from falaj.tracking.service import Runs
from falaj.tracking.tables import blocks as blocks_table
from platforms import OwnPlatform

NOON = datetime(2026, 5, 3, 12, tzinfo=UTC)
INT64 = st.integers(-(2**63), 2**63 - 1)
POINTS = st.tuples(INT64, INT64, st.floats(), st.just(False)).map(
    lambda point: (point[0], point[1], 0.0, True) if math.isnan(point[2]) else point
)


@given(st.lists(st.lists(POINTS, min_size=1, max_size=5), min_size=1, max_size=5))
def test_packed_points_come_back_in_order(parts: list[list[Point]]) -> None:
    found = unpack([pack(sorted(part)) for part in parts])

    assert found.points() == sorted(point for part in parts for point in part)
    assert unpack([found.data()]).points() == found.points()


@given(st.lists(POINTS, min_size=1, max_size=12, unique=True))
def test_points_after_another_are_those_that_sort_behind_it(points: list[Point]) -> None:
    points.sort()
    found = unpack([pack(points)])

    for number, point in enumerate(points):
        assert found.after(point).points() == points[number + 1 :]


@given(st.lists(st.floats(), min_size=1, max_size=300), st.integers(4, 50))
def test_thinning_out_keeps_the_ends_and_every_extreme(values: list[float], limit: int) -> None:
    found = unpack([pack([(n, n, 0.0 if v != v else v, v != v) for n, v in enumerate(values)])])

    thin = thin_out(found, limit=limit)

    assert len(thin) <= limit
    assert [thin.steps[0], thin.steps[-1]] == [0, len(values) - 1]
    numbers = [value for value in values if value == value]
    kept = [value for value in thin.values.tolist() if value == value]
    if numbers:
        assert (min(kept), max(kept)) == (min(numbers), max(numbers))
    assert list(thin.steps) == sorted(set(thin.steps.tolist()))


def at(step: int, value: float = 0.0, *, key: str = "loss") -> MetricPoint:
    return MetricPoint(key=key, value=value, step=step, timestamp=NOON + timedelta(seconds=step))


def history(runs: Runs, run: str) -> list[int]:
    return list(runs.metrics(run, "loss").read_all()["step"].to_pylist())


def test_single_points_are_merged_in_few_blocks(
    platform: OwnPlatform, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "OPEN_BLOCKS", 4)
    monkeypatch.setattr(metrics, "OPEN_POINTS", 10)
    run = runs.start("churn").id

    for step in range(35):
        runs.log_metrics(run, [at(step)])

    assert history(runs, run) == list(range(35))
    assert platform.count(blocks_table) < 10
    assert runs.show(run).metrics[0].points == 35


def test_steps_out_of_order_are_read_in_order_and_stored_once(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "OPEN_BLOCKS", 4)
    monkeypatch.setattr(metrics, "OPEN_POINTS", 20)
    run = runs.start("churn").id
    steps = random.Random(7).sample(range(150), 150)

    for start in range(0, 150, 7):
        runs.log_metrics(run, [at(step, step) for step in steps[start : start + 7]])
    again = runs.log_metrics(run, [at(step, step) for step in range(150)])

    assert (again.stored, again.repeated) == (0, 150)
    assert history(runs, run) == list(range(150))
    (curve,) = runs.curves(run, ("loss",), points=20, from_step=10, to_step=99)
    assert (curve.total, curve.points[0].step, curve.points[-1].step) == (90, 10, 99)


def test_histories_of_several_runs_come_in_pages(runs: Runs) -> None:
    first, second, none = (runs.start("churn").id for _ in range(3))
    runs.log_metrics(first, [at(step) for step in range(5)])
    runs.log_metrics(second, [at(step) for step in range(3)] + [at(1, math.nan), at(1, math.inf)])

    seen, after = [], ""
    while True:
        page = runs.history(first, "loss", others=(none, second), limit=2, after=after)
        assert sum(len(each.points) for each in page.items) <= 2
        seen += [(each.run, point.step, repr(point.value)) for each in page.items for point in each.points]
        if page.next is None:
            break
        after = page.next

    assert seen[:5] == [(first, step, "0.0") for step in range(5)]
    assert [(step, value) for run, step, value in seen[5:]] == [
        (0, "0.0"),
        (1, "0.0"),
        (1, "nan"),
        (1, "inf"),
        (2, "0.0"),
    ]


def test_a_peak_in_a_long_series_is_in_the_curve(runs: Runs) -> None:
    run = runs.start("churn").id
    for start in range(0, 30_000, 10_000):
        points = [
            at(step, 100.0 if step == 12_345 else math.sin(step)) for step in range(start, start + 10_000)
        ]
        runs.log_metrics(run, points)

    (curve,) = runs.curves(run, ("loss", "unknown"), points=100)

    assert curve.total == 30_000
    assert len(curve.points) <= 100
    assert (12_345, 100.0) in [(point.step, point.value) for point in curve.points]


def test_curves_of_strangers_and_of_too_many_are_refused(runs: Runs) -> None:
    run = runs.start("churn").id

    with pytest.raises(NotFound):
        runs.curves(run, ("loss",), others=("run_" + "0" * 26,))
    with pytest.raises(InvalidInput, match="points"):
        runs.curves(run, tuple(f"m{number}" for number in range(100)), points=5001)
    others = tuple(runs.start("churn").id for _ in range(2))
    with pytest.raises(InvalidInput, match="points"):
        runs.curves(run, tuple(f"m{number}" for number in range(100)), others=others, points=5000)
