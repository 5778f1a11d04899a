"""Monitors: their states, drift over time, histograms, scores by late labels, and what alerts triggered."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from falaj.apps.console.pages.monitoring.monitor import (
    MonitorRecords,
    ScorePeriod,
    histogram_view,
    monitor_view,
)
from falaj.apps.console.pages.monitoring.table import monitoring_view
from falaj.apps.console.times import Times
from falaj.records.control.pipelines import Pipeline, StoredPipeline
from falaj.records.governance.residency import UNRESTRICTED
from falaj.records.monitoring.monitors import (
    Alert,
    AlertState,
    ColumnDistribution,
    ColumnDrift,
    DriftHistory,
    DriftWindow,
    Monitor,
    MonitorWindow,
    VersionProgress,
)
from falaj.records.monitoring.sketches import ColumnKind, ColumnRole, DriftVerdict, FalseAlarmBudget
from falaj.records.serving.endpoints import DeployedEndpoint, ScoringRule, ServedRoute
from falaj.records.serving.statistics import EndpointStats, VersionStats
from falaj.records.training.jobs import JobSpec

NOON = datetime(2026, 11, 17, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
TIMES = Times(UTC)
ENDPOINT = DeployedEndpoint(
    id="endpoint_1",
    workspace="w",
    name="delay",
    model="delay",
    label=UNRESTRICTED,
    created_at=NOON,
    changed_at=NOON,
    routes=(ServedRoute(version="1", weight=100, id="version_1"),),
)


def monitor(**more: object) -> Monitor:
    progress = VersionProgress(
        version="1",
        windows=3,
        rows=900,
        waiting_rows=20,
        waiting_since=None,
        verdict=DriftVerdict.DRIFT,
        judged_until=NOON,
        own_reference=(),
    )
    fields: dict[str, object] = {
        "id": "monitor_1",
        "workspace": "w",
        "name": "delay",
        "endpoint": "endpoint_1",
        "training_set": "dataset_1",
        "reference_rows": 5000,
        "columns": ("distance",),
        "all_columns": True,
        "window": MonitorWindow(rows=300),
        "budget": FalseAlarmBudget(),
        "label": UNRESTRICTED,
        "versions": (progress,),
        "created_at": NOON,
    }
    return Monitor.model_validate(fields | more)


def alert(state: AlertState = AlertState.OPEN, *, ended: datetime | None = None) -> Alert:
    return Alert(
        id="alert_1",
        workspace="w",
        monitor="monitor_1",
        endpoint="endpoint_1",
        version="1",
        state=state,
        columns=("<b>distance",),
        words="1 of 2 columns drift",
        since=NOON,
        until=NOON,
        rows=300,
        rows_seen=900,
        raised_at=NOON,
        windows=1,
        last_until=NOON,
        ended_at=ended,
        label=UNRESTRICTED,
    )


def pipeline(started: datetime, *, cause: str = "drift", endpoint: str = "delay") -> StoredPipeline:
    definition = Pipeline(
        name="weekly",
        endpoint=endpoint,
        model="delay",
        spine="facts",
        views=("facts",),
        window=timedelta(days=30),
        job=JobSpec(name="train", script="train.py"),
    )
    return StoredPipeline(
        id="pipeline_1",
        workspace="w",
        definition=definition,
        applied_by="dana",
        started_at=started,
        cause=cause,
        verdict="it is within the margins",
        created_at=NOON,  # type: ignore[arg-type]
    )


def window(at: int, version: str, **effects: float) -> DriftWindow:
    columns = tuple(
        ColumnDrift(
            name=name,
            role=ColumnRole.FEATURE,
            verdict=DriftVerdict.TOO_FEW
            if effect < 0
            else DriftVerdict.DRIFT
            if effect > 1
            else DriftVerdict.NONE,
            effect=max(effect, 0.0),
        )
        for name, effect in effects.items()
    )
    return DriftWindow(
        version=version,
        since=NOON + at * MINUTE,
        until=NOON + (at + 1) * MINUTE,
        rows=300,
        verdict=DriftVerdict.NONE,
        columns=columns,
    )


def history(*windows: DriftWindow) -> DriftHistory:
    return DriftHistory(monitor="monitor_1", name="delay", windows=windows)


def test_monitors_and_alerts_are_listed_by_name_and_time() -> None:
    view = monitoring_view([monitor(alert="alert_1")], [alert()], [ENDPOINT], [], times=TIMES)

    (line,), (raised,) = view.lines, view.alerts
    assert (line.state, line.endpoint, line.verdicts, line.rows) == (
        "alert",
        "delay",
        "version 1: drift",
        "900",
    )
    assert (raised.monitor, raised.can_acknowledge, raised.triggered) == ("delay", True, ())
    assert "<b>distance" in raised.detail


def test_an_alert_names_the_retraining_that_it_triggered_and_no_other() -> None:
    def triggered(*pipelines: StoredPipeline, ended: datetime | None = None) -> int:
        view = monitoring_view([], [alert(ended=ended)], [ENDPOINT], pipelines, times=TIMES)
        return len(view.alerts[0].triggered)

    assert triggered(pipeline(NOON + MINUTE)) == 1
    assert triggered(pipeline(NOON - MINUTE)) == 0
    assert triggered(pipeline(NOON + MINUTE, cause="person")) == 0
    assert triggered(pipeline(NOON + MINUTE, endpoint="other")) == 0
    assert triggered(pipeline(NOON + 2 * MINUTE), ended=NOON + MINUTE) == 0


def test_the_heat_map_has_the_largest_drift_on_top_and_gaps_where_nothing_was_judged() -> None:
    found = history(
        window(0, "1", wind=0.1, distance=-1),
        window(1, "1", wind=0.2, distance=1.5),
        window(1, "2", wind=9.0),
    )

    view = monitor_view(MonitorRecords(monitor(), found), version="1", times=TIMES)

    assert (view.drift.columns, view.drift.windows) == (("distance", "wind"), ("12:01:00", "12:02:00"))
    assert view.drift.effects == ((None, 1.5), (0.1, 0.2))
    assert view.drift.last == (("wind", "no drift", "0.2"), ("distance", "drift", "1.5"))
    assert (view.versions, view.drift.since) == (("2", "1"), NOON + MINUTE)
    assert monitor_view(MonitorRecords(monitor(), found), version="", times=TIMES).version == "2"
    alarmed = MonitorRecords(monitor(), found, alerts=(alert(),))
    assert monitor_view(alarmed, version="", times=TIMES).version == "1"
    ended = MonitorRecords(monitor(), found, alerts=(alert(AlertState.ENDED, ended=NOON),))
    assert monitor_view(ended, version="", times=TIMES).version == "2"


def test_a_monitor_without_windows_has_an_empty_map() -> None:
    view = monitor_view(MonitorRecords(monitor(versions=()), history()), version="", times=TIMES)

    assert (view.state, view.drift.windows, view.scores) == ("waiting", (), ())


def test_scores_follow_the_time_of_the_prediction() -> None:
    def period(at: int, score: float | None) -> ScorePeriod:
        stats = VersionStats(version="1", labelled=5, score_mean=score)
        since = NOON + at * MINUTE
        found = EndpointStats(endpoint="delay", since=since, scoring=ScoringRule.LOG_LOSS, versions=(stats,))
        return ScorePeriod(since, since + MINUTE, found)

    records = MonitorRecords(monitor(), history(), periods=(period(0, 0.5), period(1, None), period(2, 0.9)))

    view = monitor_view(records, version="", times=TIMES)

    (curve,) = view.scores
    assert (curve.scores, curve.labels, view.scoring) == ((0.5, 0.9), 10, "log_loss")
    assert curve.times_ms[0] == (NOON + MINUTE / 2).timestamp() * 1000


def test_histograms_say_how_many_rows_and_nulls_there_are() -> None:
    found = ColumnDistribution(
        column="carrier",
        version="1",
        since=NOON,
        until=NOON,
        kind=ColumnKind.CATEGORICAL,
        categories=("AA", "<b>"),
        before=(6.0, 2.0),
        now=(1.0, 1.0),
        nulls=(2, 0),
    )

    view = histogram_view(found, times=TIMES)

    assert (view.labels, view.edges) == (("AA", "<b>"), (0.0, 1.0, 2.0))
    assert "10 rows before and 2 now; nulls 20.0 % before and 0.0 % now" in view.words
