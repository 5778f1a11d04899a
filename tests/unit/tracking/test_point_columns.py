"""Points as columns, as the MLflow interface reads them: stored, digested and refused exactly as records are."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from falaj.apps.api.mlflow.runs import LoggedPoint, _points
from falaj.errors import Conflict, InvalidInput, KeyReused
from falaj.governance.operations.caller import on_terms
from falaj.governance.operations.operation import operations_of
from falaj.records.tracking import BATCH_POINTS, PointColumns
from falaj.tracking.series import group_points
from falaj.tracking.service import Runs
from platforms import OwnPlatform

NOON = datetime(2026, 5, 3, 12, tzinfo=UTC)
LOG_METRICS = operations_of(Runs)["log_metrics"]
MILLIS = st.integers(-62_135_596_800_000, 253_402_300_799_999)
LOGGED = st.builds(
    LoggedPoint,
    key=st.sampled_from(["loss", "val/auc", "späße 1"]),
    value=st.floats(),
    timestamp=MILLIS,
    step=st.integers(-(2**63), 2**63 - 1),
)


def columns(*points: tuple[str, int, int, float]) -> PointColumns:
    found = PointColumns.checked(*zip(*points, strict=True))
    assert found is not None
    return found


@given(st.lists(LOGGED, min_size=1, max_size=20))
def test_columns_are_grouped_as_the_records_that_they_stand_for(logged: list[LoggedPoint]) -> None:
    found = _points(logged)

    assert isinstance(found, PointColumns)
    assert group_points(found, now=NOON) == group_points(tuple(found), now=NOON)
    for points in group_points(found, now=NOON).values():
        assert all(one < other for one, other in pairwise(points))


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": "no;semicolon"},
        {"key": ""},
        {"key": "k" * 251},
        {"step": 2**63},
        {"step": -(2**63) - 1},
        {"value": "much"},
    ],
)
def test_a_point_that_is_wrong_is_refused_by_name_as_a_record(wrong: dict[str, object]) -> None:
    good = {"key": "loss", "value": 0.5, "timestamp": 1, "step": 1}
    logged = [LoggedPoint(**good), LoggedPoint(**good | wrong)]

    with pytest.raises(InvalidInput) as refused:
        LOG_METRICS.check({"run": "run_x", "points": _points(logged)})

    assert [fault.where for fault in refused.value.faults] == [f"points.1.{next(iter(wrong))}"]


@pytest.mark.parametrize("millis", [253_402_300_800_000, -62_135_596_800_001, 2**80])
def test_a_moment_that_no_calendar_has_is_refused(millis: int) -> None:
    with pytest.raises(InvalidInput, match="timestamp"):
        _points([LoggedPoint("loss", 0.5, timestamp=millis)])


def test_more_points_than_a_batch_takes_are_refused() -> None:
    logged = [LoggedPoint("loss", 0.5, timestamp=1, step=step) for step in range(BATCH_POINTS + 1)]

    with pytest.raises(InvalidInput, match="points"):
        LOG_METRICS.check({"run": "run_x", "points": _points(logged)})
    assert isinstance(_points(logged[1:]), PointColumns)


def test_points_without_a_time_of_a_model_or_spelled_in_words_are_records() -> None:
    for other in ({"timestamp": None}, {"model_id": "m"}, {"dataset_name": "d"}, {"value": "NaN"}):
        found = _points([LoggedPoint(**{"key": "loss", "value": 0.5, "timestamp": 1} | other)])
        assert isinstance(found, list)


def test_columns_are_stored_once_in_order_and_across_the_size_of_a_block(runs: Runs) -> None:
    run = runs.start("churn").id
    points = [
        ("loss", step, 1_000_000 + step, math.nan if step == 5 else step * 0.5) for step in range(9_000)
    ]

    logged = runs.log_metrics(run, columns(*points[::-1]))
    again = runs.log_metrics(run, columns(*points[:100]))
    mixed = runs.log_metrics(run, tuple(columns(*points[100:200])))

    assert (logged.stored, again.repeated, mixed.repeated) == (9_000, 100, 100)
    (found,) = runs.show(run).metrics
    assert (found.points, found.last, found.last_step, found.low, found.high) == (
        9_000,
        4_499.5,
        8_999,
        0.0,
        4_499.5,
    )


def test_a_named_batch_of_columns_is_the_batch_of_its_records(runs: Runs) -> None:
    run, given = runs.start("churn").id, columns(("loss", 1, 1_000_000, 0.5))

    first = runs.log_metrics(run, given, batch="b")
    again = runs.log_metrics(run, tuple(given), batch="b")

    assert first == again
    with pytest.raises(KeyReused):
        runs.log_metrics(run, columns(("loss", 1, 1_000_000, 0.6)), batch="b")


def test_the_digest_tells_any_two_batches_apart() -> None:
    batches = [
        columns(("ab", 1, 2, 3.0)),
        columns(("a", 1, 2, 3.0), ("b", 1, 2, 3.0)),
        columns(("ab", 2, 1, 3.0)),
        columns(("ab", 1, 2, math.nan)),
        columns(("ab", 1, 2, math.inf)),
        columns(("b", 1, 2, 3.0), ("a", 1, 2, 3.0)),
    ]

    assert len({each.digest() for each in batches}) == len(batches)
    assert columns(("ab", 1, 2, 3.0)).digest() == batches[0].digest()


def test_what_was_logged_as_columns_is_in_the_audit_log(platform: OwnPlatform, runs: Runs) -> None:
    run = runs.start("churn").id
    digests = []
    for value in (0.5, 0.5, 0.7):
        runs.log_metrics(run, columns(("loss", 1, 1_000_000, value)))
        platform.parts.gate.hot.flush(all_windows=True)
        digests.append([each for each in platform.entries() if each["action"] == "runs.log_metrics"][-1])

    assert digests[0]["input"] == digests[1]["input"] != digests[2]["input"]
    assert [each["count"] for each in digests] == [1, 1, 1]
    runs.delete(run)
    with pytest.raises(Conflict, match="deleted"):
        runs.log_metrics(run, columns(("loss", 2, 1_000_000, 0.5)))
    assert platform.entries()[-1]["outcome"] == "failed"


def test_a_key_of_one_batch_is_not_taken_for_another(runs: Runs) -> None:
    run = runs.start("churn").id
    with on_terms(key="once"):
        runs.log_batch(run, metrics=columns(("loss", 1, 1_000_000, 0.5)), params={"lr": 0.1})

    with on_terms(key="once"), pytest.raises(KeyReused):
        runs.log_batch(run, metrics=columns(("loss", 1, 1_000_000, 0.6)), params={"lr": 0.1})
