"""One monitor: drift of each feature over time, its values before and now, scores by late labels, and its alerts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from nicegui import background_tasks, ui

from falaj.apps.console.charts.bars import histogram_pair
from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.grids import heat_map
from falaj.apps.console.charts.lines import Curve, line_chart
from falaj.apps.console.charts.palette import palette
from falaj.apps.console.components.states import empty_state, error_card, fact, state_badge
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.monitoring.table import (
    ACKNOWLEDGE,
    VERDICTS,
    AlertLine,
    alert_lines,
    draw_alerts,
    monitor_state,
    verdict_words,
)
from falaj.apps.console.times import Times, duration, number
from falaj.errors import Denied, FalajError, NotFound
from falaj.records.control.pipelines import StoredPipeline
from falaj.records.monitoring.monitors import Alert, ColumnDistribution, DriftHistory, DriftWindow, Monitor
from falaj.records.record import utc_now
from falaj.records.serving.endpoints import DeployedEndpoint
from falaj.records.serving.statistics import EndpointStats
from falaj.sdk.platform import Platform

TONES = {"alert": "bad", "ok": "good", "waiting": "waiting"}
WINDOWS = 48
FOLLOW_S = 10.0
"""A monitor is loaded again at most this often while rows come in: its history asks for much."""
MOST_COLUMNS = 60
"""Columns of the heat map, those with the largest drift first."""
PERIODS = 12
"""Times in which scores are averaged."""
SHORTEST_PERIOD = timedelta(minutes=2)


@dataclass(frozen=True)
class ScorePeriod:
    """The scores of all versions in one time, by late labels."""

    since: datetime
    until: datetime
    stats: EndpointStats


@dataclass(frozen=True)
class MonitorRecords:
    """What the page is made from; none or empty where the person may not see it."""

    monitor: Monitor
    history: DriftHistory
    endpoint: DeployedEndpoint | None = None
    alerts: Sequence[Alert] = ()
    pipelines: Sequence[StoredPipeline] = ()
    periods: Sequence[ScorePeriod] = ()


@dataclass(frozen=True)
class DriftMap:
    """The drift of columns over time of one version."""

    columns: tuple[str, ...]
    windows: tuple[str, ...]
    effects: tuple[tuple[float | None, ...], ...]
    """A row for each column: its effect in each window; none where it was not judged."""
    last: tuple[tuple[str, str, str], ...]
    """Column, verdict and effect in the last window."""
    since: datetime | None
    """When the last window began."""


@dataclass(frozen=True)
class ScoreCurve:
    """The mean score of a version in each time."""

    version: str
    times_ms: tuple[float, ...]
    scores: tuple[float, ...]
    labels: int


@dataclass(frozen=True)
class MonitorView:
    """What the page shows beside the histograms."""

    id: str
    name: str
    state: str
    endpoint: str
    facts: tuple[tuple[str, str], ...]
    versions: tuple[str, ...]
    version: str
    drift: DriftMap
    scores: tuple[ScoreCurve, ...]
    scoring: str
    alerts: tuple[AlertLine, ...]


def monitor_view(records: MonitorRecords, *, version: str, times: Times) -> MonitorView:
    """Return what the page shows of a monitor and one of its versions.

    Empty: the one with an open alert, else the one that answers most requests, else the one that served last.
    """
    found, windows = records.monitor, records.history.windows
    versions = tuple(dict.fromkeys(each.version for each in reversed(windows)))
    routes = records.endpoint.routes if records.endpoint else ()
    wanted = [version, *(each.version for each in records.alerts if each.ended_at is None)]
    wanted += [each.version for each in sorted(routes, key=lambda each: -each.weight)]
    shown = next((each for each in (*wanted, *versions) if each in versions), "")
    endpoint = records.endpoint.name if records.endpoint else found.endpoint
    window, budget = found.window, found.budget
    size = [f"{window.rows:,} rows"] if window.rows else []
    size += [duration(window.duration)] if window.duration else []
    return MonitorView(
        id=found.id,
        name=found.name,
        state=monitor_state(found),
        endpoint=endpoint,
        facts=(
            ("endpoint", endpoint),
            ("reference", f"{found.training_set} ({found.reference_rows:,} rows)"),
            ("window", " and ".join(size)),
            ("false alarms", f"at most {budget.alpha:.0%} in {budget.looks} windows, all columns together"),
            ("last verdicts", verdict_words(found)),
            (
                "waiting rows",
                ", ".join(f"version {each.version}: {each.waiting_rows:,}" for each in found.versions) or "–",
            ),
        ),
        versions=versions,
        version=shown,
        drift=_drift_map([each for each in windows if each.version == shown], times),
        scores=_scores(records.periods),
        scoring=next((str(each.stats.scoring) for each in records.periods if each.stats.scoring), ""),
        alerts=alert_lines(
            records.alerts, {found.id: found.name}, {found.endpoint: endpoint}, records.pipelines, times=times
        ),
    )


def _drift_map(windows: Sequence[DriftWindow], times: Times) -> DriftMap:
    largest: dict[str, float] = {}
    for window in windows:
        for each in window.columns:
            largest[each.name] = max(largest.get(each.name, 0.0), each.effect)
    columns = tuple(sorted(largest, key=lambda name: (-largest[name], name))[:MOST_COLUMNS])
    by_window = [{each.name: each for each in window.columns} for window in windows]
    effects = tuple(
        tuple(
            round(window[name].effect, 4) if name in window and window[name].verdict != "too_few" else None
            for window in by_window
        )
        for name in columns
    )
    last = tuple(
        (each.name, VERDICTS[each.verdict], number(each.effect))
        for each in (windows[-1].columns if windows else ())
    )
    same_day = len({times.day(each.until) for each in windows}) < 2
    labels = tuple(
        times.clock(each.until) if same_day else times.moment(each.until)[5:16] for each in windows
    )
    return DriftMap(columns, labels, effects, last, windows[-1].since if windows else None)


def _scores(periods: Sequence[ScorePeriod]) -> tuple[ScoreCurve, ...]:
    found: dict[str, list[tuple[float, float, int]]] = {}
    for each in periods:
        for version in each.stats.versions:
            if version.score_mean is not None:
                middle = each.since + (each.until - each.since) / 2
                point = (middle.timestamp() * 1000, version.score_mean, version.labelled)
                found.setdefault(version.version, []).append(point)
    return tuple(
        ScoreCurve(
            version,
            tuple(at for at, _, _ in points),
            tuple(score for _, score, _ in points),
            sum(labels for _, _, labels in points),
        )
        for version, points in sorted(found.items(), key=lambda item: (len(item[0]), item[0]))
    )


@dataclass(frozen=True)
class HistogramView:
    """The values of a column in the reference and now, in the same bins."""

    column: str
    labels: tuple[str, ...]
    """Names of bins; empty for numbers, which have edges."""
    edges: tuple[float, ...]
    before: tuple[float, ...]
    now: tuple[float, ...]
    words: str


def histogram_view(found: ColumnDistribution, *, times: Times) -> HistogramView:
    """Return the histograms of a column."""
    rows = [sum(counts) + nulls for counts, nulls in zip((found.before, found.now), found.nulls, strict=True)]
    shares = [100 * nulls / max(whole, 1) for nulls, whole in zip(found.nulls, rows, strict=True)]
    return HistogramView(
        column=found.column,
        labels=found.categories,
        edges=found.edges or tuple(float(at) for at in range(len(found.categories) + 1)),
        before=found.before,
        now=found.now,
        words=f"version {found.version}, {times.moment(found.since)} to {times.moment(found.until)}: "
        f"{rows[0]:,.0f} rows before and {rows[1]:,.0f} now; nulls {shares[0]:.1f} % before and {shares[1]:.1f} % now",
    )


# ------------------------------------------------------------------------------------------- drawing


def _records(platform: Platform, monitor: str, workspace: str) -> MonitorRecords:
    found = platform.monitoring.show(monitor)
    records = MonitorRecords(found, platform.monitoring.history(found.id, windows=WINDOWS))
    try:
        alerts = platform.monitoring.alerts(monitor=found.id, limit=1000).items
        records = replace(records, alerts=alerts, endpoint=platform.endpoints.show(found.endpoint))
        records = replace(records, periods=_periods(platform, records))
        pipelines = platform.pipelines.list(workspace=workspace, limit=1000).items
        records = replace(records, pipelines=pipelines)
    except (Denied, NotFound):
        pass
    return records


def _periods(platform: Platform, records: MonitorRecords) -> tuple[ScorePeriod, ...]:
    """Return the scores of the time in which the monitor has windows, in some periods."""
    windows, now = records.history.windows, utc_now()
    begin = min((each.since for each in windows), default=records.monitor.created_at)
    whole = platform.endpoints.stats(records.monitor.endpoint, since=begin)
    if not any(each.labelled for each in whole.versions):
        return ()
    length = max((now - begin) / PERIODS, SHORTEST_PERIOD)
    starts = [begin + length * number for number in range(PERIODS) if begin + length * number < now]
    return tuple(
        ScorePeriod(
            start,
            start + length,
            platform.endpoints.stats(records.monitor.endpoint, since=start, until=start + length),
        )
        for start in starts
    )


class MonitorPage:
    """The open page of one monitor."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.monitor = f"{context.workspace}/{context.params['monitor']}"
        self.version = context.query.get("version", "")
        self.column = context.query.get("column", "")
        self.may: frozenset[str] = frozenset()
        self.shown: MonitorView | None = None

    async def load(self) -> MonitorView:
        """Ask for the monitor and all that belongs to it."""
        here = self.context.workspace
        found = await self.context.ask(lambda p: _records(p, self.monitor, here))
        self.shown = monitor_view(found, version=self.version, times=self.context.times)
        return self.shown

    async def draw(self) -> None:
        self.may = await self.context.may()
        self.region = await self.context.region(
            self.load,
            self._draw_view,
            events=("monitoring.*", "pipelines.*", "endpoints.feedback"),
            objects=lambda view: (view.id,),
            gather_s=FOLLOW_S,
        )
        self.histogram = ui.element("div")
        view = self.shown
        if view is not None and view.drift.columns:
            await self.choose(self.column if self.column in view.drift.columns else view.drift.columns[0])

    async def _refresh(self) -> None:
        await self.region.refresh()

    def _draw_view(self, view: MonitorView) -> None:
        context = self.context
        with ui.element("div").classes("toolbar"):
            ui.label(view.name).classes("title wrap").style("margin: 0").props("role=heading aria-level=1")
            state_badge(view.state, tone=TONES[view.state])
            ui.link(f"endpoint {view.endpoint}", context.href("endpoints", view.endpoint)).classes("wrap")
        with _panel("Alerts"):
            if not view.alerts:
                empty_state("No alert was raised.", icon="verified")
            draw_alerts(context, view.alerts, may=self.may, after=self._refresh)
        with _panel("Drift of each column over time"):
            self._draw_map(view)
        with ui.element("div").classes("columns").style("margin-top: 0"):
            with _panel("Scores by labels that came later"):
                self._draw_scores(view)
            with _panel("Facts"), ui.element("dl").classes("facts"):
                for name, value in view.facts:
                    fact(name, value)

    def _draw_map(self, view: MonitorView) -> None:
        drift = view.drift
        if not drift.windows:
            empty_state(
                "No rows were received yet: the model server sends them every few seconds.",
                command=f"falaj endpoints infer {view.endpoint} …",
                icon="hourglass_empty",
            )
            return
        with ui.element("div").classes("toolbar"):
            if len(view.versions) > 1:
                ui.select(
                    {each: f"version {each}" for each in view.versions},
                    value=view.version,
                    label="Version",
                    on_change=lambda event: self._change(str(event.value)),
                ).props("dense outlined").classes("chooser")
            ui.label("Click on a column to see its values before and now.").classes("muted small")
        options = heat_map(
            drift.columns,
            drift.windows,
            drift.effects,
            palette(self.context.is_dark),
            title=f"Drift of {len(drift.columns)} columns in {len(drift.windows)} windows of version {view.version}, "
            "in standard deviations",
            unit="drift [σ]",
        )
        chart(options, height_px=140 + 26 * len(drift.columns), on_click=self._clicked(drift.columns))
        columns = [
            TableColumn("column", "Column, last window", sortable=True),
            TableColumn("verdict", "Verdict", sortable=True),
            TableColumn("effect", "Drift [σ]", "number"),
        ]
        rows = [
            TableRow(str(at), {"column": name, "verdict": verdict, "effect": effect})
            for at, (name, verdict, effect) in enumerate(drift.last)
        ]
        data_table(columns, rows, title="Columns in the last window")

    def _clicked(self, columns: Sequence[str]) -> Callable[[dict[str, Any]], None]:
        def clicked(data: dict[str, Any]) -> None:
            value = data.get("value")
            at = value[1] if isinstance(value, list) and len(value) > 1 else None
            if isinstance(at, int) and 0 <= at < len(columns):
                background_tasks.create(self._choose_here(columns[at]), name="histogram")

        return clicked

    async def _choose_here(self, column: str) -> None:
        with self.context.client:
            await self.choose(column)

    async def _change(self, version: str) -> None:
        self.version = version
        self._keep()
        await self.region.refresh()
        if self.column:
            await self.choose(self.column)

    def _keep(self) -> None:
        name = self.context.params["monitor"]
        address = self.context.href("monitoring", name, version=self.version, column=self.column)
        ui.navigate.history.replace(address)

    async def choose(self, column: str) -> None:
        """Show the histograms of a column, and put it into the address."""
        if column != self.column:
            self.column = column
            self._keep()
        view = self.shown
        monitor, version, since = (
            self.monitor,
            view.version if view else None,
            view.drift.since if view else None,
        )
        self.histogram.clear()
        with self.histogram, _panel("Values before and now").props("data-part=histogram"):
            names = [*view.drift.columns] if view else [column]
            ui.select(
                names, value=column, label="Column", on_change=lambda event: self.choose(event.value)
            ).props("dense outlined").classes("chooser")
            try:
                found = await self.context.ask(
                    lambda p: p.monitoring.distribution(monitor, column, version=version or None, since=since)
                )
            except FalajError as error:
                error_card(error)
                return
            _draw_histogram(self.context, histogram_view(found, times=self.context.times))

    def _draw_scores(self, view: MonitorView) -> None:
        if not view.scores:
            empty_state(
                "No prediction has a label yet.",
                command=f"falaj endpoints feedback {view.endpoint} …",
                icon="hourglass_empty",
            )
            return
        words = view.scoring.replace("_", " ")
        curves = [
            Curve(f"version {each.version} ({each.labels:,} labels)", each.times_ms, each.scores)
            for each in view.scores
        ]
        options = line_chart(
            curves,
            palette(self.context.is_dark),
            title=f"Mean {words} of each version by the time of the prediction; less is better",
            x_name="time of the prediction",
            y_name=f"mean {words}",
            x_time=True,
        )
        chart(options, height_px=280)
        ui.label("Less is better. Periods change while labels arrive.").classes("muted small")


def _draw_histogram(context: PageContext, view: HistogramView) -> None:
    if not view.before:
        empty_state("The column has no values, before or now.", icon="block")
        return
    options = histogram_pair(
        view.edges,
        view.before,
        view.now,
        palette(context.is_dark),
        title=f"Values of {view.column} in the reference and now",
        names=("reference", "now"),
    )
    if view.labels:
        options["xAxis"]["data"] = [*view.labels]
    chart(options, height_px=300)
    ui.label(view.words).classes("muted small wrap")


def _panel(title: str) -> ui.element:
    with ui.element("section").classes("panel").style("margin-top: 16px") as panel:
        ui.label(title).classes("panel-title").props("role=heading aria-level=2")
    return panel


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await MonitorPage(context).draw()


PAGE = ConsolePage(
    "/w/{workspace}/monitoring/{monitor}",
    "Monitor",
    draw,
    entry="monitoring",
    reads=(
        "monitoring.show",
        "monitoring.history",
        "monitoring.distribution",
        "monitoring.alerts",
        "endpoints.show",
        "endpoints.stats",
        "pipelines.list",
    ),
    actions=(ACKNOWLEDGE,),
)
