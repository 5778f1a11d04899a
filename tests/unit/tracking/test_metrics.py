"""Metrics: acknowledged points are stored once, for any numbers and any number of concurrent writers."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from falaj.errors import Conflict, InvalidInput, KeyReused, NotFound
from falaj.governance.operations.operation import operations_of
from falaj.records.tracking import BATCH_POINTS, INT64_MAX, INT64_MIN, Metric, MetricPoint
from falaj.tracking import histories
from falaj.tracking.service import Runs
from falaj.tracking.tables import blocks as blocks_table
from platforms import OwnPlatform

OPERATION = operations_of(Runs)["log_metrics"]
NOON = datetime(2026, 5, 3, 12, tzinfo=UTC)


def at(step: int, value: float, key: str = "loss", *, moment: datetime = NOON) -> MetricPoint:
    return MetricPoint(key=key, value=value, step=step, timestamp=moment)


def history(runs: Runs, run: str, key: str = "loss", **options: Any) -> list[tuple[int, float]]:
    table = runs.metrics(run, key, **options).read_all()
    return list(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True))


def summary(runs: Runs, run: str, key: str = "loss") -> Metric:
    return next(metric for metric in runs.show(run).metrics if metric.key == key)


@pytest.fixture
def run(runs: Runs) -> str:
    return runs.start("churn").id


# -------------------------------------------------------------------------------------------- storage


def test_a_batch_comes_back_in_order_with_its_summary(runs: Runs, run: str) -> None:
    logged = runs.log_metrics(run, [at(2, 0.5), at(1, 0.75), at(3, 0.25), at(1, 0.9, "accuracy")])

    assert (logged.stored, logged.repeated) == (4, 0)
    assert history(runs, run) == [(1, 0.75), (2, 0.5), (3, 0.25)]
    loss = summary(runs, run)
    assert (loss.points, loss.last, loss.last_step, loss.low, loss.high) == (3, 0.25, 3, 0.25, 0.75)
    assert loss.last_timestamp == NOON
    assert [metric.key for metric in runs.show(run).metrics] == ["accuracy", "loss"]


def test_nan_and_infinity_are_kept(runs: Runs, run: str) -> None:
    given = [at(1, math.nan), at(2, math.inf), at(3, -math.inf), at(4, 0.0), at(5, math.nan)]

    runs.log_metrics(run, given)

    assert [repr(value) for _, value in history(runs, run)] == ["nan", "inf", "-inf", "0.0", "nan"]
    loss = summary(runs, run)
    assert math.isnan(loss.last)
    assert (loss.low, loss.high) == (-math.inf, math.inf)


def test_a_metric_that_is_only_nan_has_no_extremes(runs: Runs, run: str) -> None:
    runs.log_metrics(run, [at(1, math.nan)])
    runs.log_metrics(run, [at(2, math.nan)])

    loss = summary(runs, run)
    assert (loss.points, loss.low, loss.high) == (2, None, None)
    assert math.isnan(loss.last)


def test_steps_and_values_reach_to_the_ends_of_their_types(runs: Runs, run: str) -> None:
    extremes = [(INT64_MIN, 5e-324), (0, -1.7976931348623157e308), (INT64_MAX, 1.7976931348623157e308)]

    runs.log_metrics(run, [at(step, value) for step, value in extremes])

    assert history(runs, run) == extremes
    assert history(runs, run, from_step=1) == extremes[2:]


def test_a_point_without_a_timestamp_is_of_the_moment_it_arrives(
    platform: OwnPlatform, runs: Runs, run: str
) -> None:
    runs.log_metrics(run, [MetricPoint(key="loss", value=1.0)])

    assert runs.metrics(run, "loss").read_all()["timestamp"].to_pylist() == [platform.clock.now]


def test_a_history_is_read_by_pages(runs: Runs, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "PAGE", 3)
    given = [(step, float(step)) for step in range(10)]
    runs.log_metrics(run, [at(step, value) for step, value in given])

    assert history(runs, run) == given
    assert history(runs, run, from_step=8) == given[8:]


def test_late_points_do_not_become_the_last(runs: Runs, run: str) -> None:
    runs.log_metrics(run, [at(10, 0.5)])

    runs.log_metrics(run, [at(3, 9.0), at(10, 0.7, moment=NOON - timedelta(seconds=1))])

    loss = summary(runs, run)
    assert (loss.points, loss.last, loss.last_step, loss.high) == (3, 0.5, 10, 9.0)


# ------------------------------------------------------------------------------------ repeated batches


def test_the_same_point_is_stored_once(runs: Runs, run: str) -> None:
    given = [at(1, 0.5), at(1, 0.5), at(2, math.nan), at(2, math.nan)]

    first = runs.log_metrics(run, given)
    again = runs.log_metrics(run, [*given, at(3, 0.1)])

    assert (first.stored, first.repeated) == (2, 2)
    assert (again.stored, again.repeated) == (1, 4)
    assert [step for step, _ in history(runs, run)] == [1, 2, 3]
    assert summary(runs, run).points == 3


def test_another_value_at_the_same_step_and_time_is_another_point(runs: Runs, run: str) -> None:
    runs.log_metrics(run, [at(1, 0.5)])

    runs.log_metrics(run, [at(1, 0.25), at(1, 0.5, moment=NOON + timedelta(microseconds=1))])

    assert history(runs, run) == [(1, 0.25), (1, 0.5), (1, 0.5)]


def test_a_batch_that_is_sent_again_is_not_counted_twice(platform: OwnPlatform, runs: Runs, run: str) -> None:
    given = [MetricPoint(key="loss", value=1.0)]
    first = runs.log_metrics(run, given, batch="b-1")
    platform.clock.advance(timedelta(seconds=1))

    again = runs.log_metrics(run, given, batch="b-1")
    other = runs.log_metrics(run, given, batch="b-2")

    assert again == first
    assert other.stored == 1
    assert len(history(runs, run)) == 2
    with pytest.raises(KeyReused):
        runs.log_metrics(run, [MetricPoint(key="loss", value=2.0)], batch="b-1")


def test_a_batch_that_was_stored_is_acknowledged_even_after_the_deletion(runs: Runs, run: str) -> None:
    first = runs.log_metrics(run, [at(1, 0.5)], batch="last")
    runs.delete(run)

    assert runs.log_metrics(run, [at(1, 0.5)], batch="last") == first
    with pytest.raises(Conflict):
        runs.log_metrics(run, [at(2, 0.5)], batch="later")


# ---------------------------------------------------------------------------------------------- refusal


def test_a_deleted_run_takes_no_metrics_until_it_is_restored(runs: Runs, run: str) -> None:
    runs.delete(run)

    with pytest.raises(Conflict, match="deleted"):
        runs.log_metrics(run, [at(1, 0.5)])
    runs.restore(run)
    assert runs.log_metrics(run, [at(1, 0.5)]).stored == 1


def test_an_object_that_is_not_a_run_takes_no_metrics(platform: OwnPlatform, runs: Runs) -> None:
    blob = platform.put("b", b"x").id

    for ident in ("run_" + "0" * 26, "nobody-knows", blob):
        with pytest.raises(NotFound):
            runs.log_metrics(ident, [at(1, 0.5)])


@pytest.mark.parametrize(
    ("points", "where"),
    [
        ([], "points"),
        ([{"key": "", "value": 1}], "points.0.key"),
        ([{"key": "k" * 251, "value": 1}], "points.0.key"),
        ([{"key": "a\x00b", "value": 1}], "points.0.key"),
        ([{"key": "line\n", "value": 1}], "points.0.key"),
        ([{"key": "k", "value": "much"}], "points.0.value"),
        ([{"key": "k", "value": None}], "points.0.value"),
        ([{"key": "k", "value": 1, "step": 2**63}], "points.0.step"),
        ([{"key": "k", "value": 1, "step": 1.5}], "points.0.step"),
        ([{"key": "k", "value": 1, "timestamp": "2026-05-03T12:00:00"}], "points.0.timestamp"),
        ([{"key": "k", "value": 1, "unit": "s"}], "points.0.unit"),
        ([{"key": "k", "value": 1}] * (BATCH_POINTS + 1), "points"),
    ],
)
def test_wrong_input_is_reported_by_its_position(points: Sequence[Any], where: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        OPERATION.check({"run": "run", "points": points})

    assert refused.value.faults[0].where == where


@pytest.mark.parametrize("value", [0.1, math.nan, math.inf, -math.inf])
def test_every_number_round_trips_through_json(value: float) -> None:
    given = OPERATION.check({"run": "run", "points": [at(1, value)]})

    (received,) = OPERATION.check_json(given.model_dump_json().encode()).points

    assert repr(received.value) == repr(value)


def test_an_unknown_metric_is_not_found(runs: Runs, run: str) -> None:
    with pytest.raises(NotFound, match="accuracy"):
        runs.metrics(run, "accuracy")


# ------------------------------------------------------------------------------------------ durability


@pytest.mark.slow
def test_acknowledged_points_are_seen_by_every_process(platform: OwnPlatform, runs: Runs, run: str) -> None:
    runs.log_metrics(run, [at(1, 0.5)])

    elsewhere = platform.again()

    assert elsewhere.count(blocks_table) == 1


def test_many_threads_lose_nothing(platform: OwnPlatform, runs: Runs) -> None:
    own = [runs.start("churn").id for _ in range(4)]
    faults: list[Exception] = []

    def ingest(number: int) -> None:
        try:
            for round_ in range(4):
                base = (number * 4 + round_) * 50
                points = [at(base + step, float(base + step), f"m{step % 5}") for step in range(50)]
                runs.log_metrics(own[number % 4], [*points, at(-1, 0.0)], batch=f"{number}-{round_}")
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=ingest, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert faults == []
    for run in own:
        counts = {metric.key: metric.points for metric in runs.show(run).metrics}
        assert counts == {"loss": 1, **{f"m{number}": 160 for number in range(5)}}


def test_one_audit_entry_counts_the_batches(platform: OwnPlatform, runs: Runs, run: str) -> None:
    for step in range(20):
        runs.log_metrics(run, [at(step, 1.0)])
    runs.gate.hot.flush(all_windows=True)

    entries = [entry for entry in platform.entries() if entry["action"] == "runs.log_metrics"]
    assert [(entry["count"], entry["objects"]) for entry in entries] == [(20, [run])]
