"""The table of runs: its address, its columns, and what the API is asked to sort by."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from falaj.apps.console.components.tables import Sorting
from falaj.apps.console.pages.runs.table import RunQuery, RunsView, runs_view
from falaj.apps.console.times import Times
from falaj.records.tracking import ListedRun, Metric, Param, RunStatus

NOON = datetime(2026, 11, 17, 12, tzinfo=UTC)
HOSTILE = "<img src=x onerror=alert(1)>"


def run(name: str, **metrics: float) -> ListedRun:
    return ListedRun(
        id="run_1",
        workspace="workspace_1",
        experiment="experiment_1",
        name=name,
        status=RunStatus.FINISHED,
        owner="dana",
        started_at=NOON,
        ended_at=NOON + timedelta(seconds=90),
        params=(Param(key="lr", value=HOSTILE),),
        metrics=tuple(
            Metric(key=key, points=1, last=value, last_step=1, last_timestamp=NOON)
            for key, value in metrics.items()
        ),
    )


def view(*runs: ListedRun, query: RunQuery | None = None) -> RunsView:
    return runs_view(runs, (), query or RunQuery(), following=None, times=Times(UTC), base="/w/default/runs")


def test_the_address_holds_all_that_the_person_chose() -> None:
    query = RunQuery(
        where="metrics.auc > 0.9 & more", experiment="e", metrics=("auc", "loss"), params=("lr",), after="x"
    )

    assert RunQuery.of(query.fields()) == query


@pytest.mark.parametrize(
    ("sorting", "order"),
    [
        (Sorting("started", descending=True), "attributes.start_time DESC"),
        (Sorting("metrics.val loss"), 'metrics."val loss" ASC'),
        (Sorting('params.a"b', descending=True), 'params.`a"b` DESC'),
        (Sorting("nonsense; drop"), "attributes.start_time ASC"),
    ],
)
def test_the_api_sorts_by_what_was_chosen(sorting: Sorting, order: str) -> None:
    assert RunQuery(sorting=sorting).order_by == order


def test_names_of_metrics_are_labels_and_no_keys_of_columns() -> None:
    shown = view(run("first", **{":onclick": 0.5, "auc": float("nan")}))

    assert [(each.key, each.label) for each in shown.columns if each.kind == "number"] == [
        ("m0", ":onclick"),
        ("m1", "auc"),
        ("took", "Duration"),
    ]
    assert shown.sort_keys["m0"] == "metrics.:onclick"
    assert shown.rows[0].cells["m1"] == "nan"
    assert shown.rows[0].cells["took"] == "1m 30s"


def test_parameters_are_shown_where_they_were_chosen() -> None:
    shown = view(run("first"), query=RunQuery(params=("lr", "gone")))

    assert shown.rows[0].cells["p0"] == HOSTILE
    assert shown.rows[0].cells["p1"] == "–"
    assert shown.known_params == ("lr", "gone")
