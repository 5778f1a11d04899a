"""The monitors of a workspace, and the alerts that they raised with what those triggered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.actions import action_button
from falaj.apps.console.components.states import BAD, GOOD, IDLE, WAITING, empty_state, state_badge
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.times import Times
from falaj.errors import Denied, NotFound
from falaj.records.control.pipelines import StoredPipeline
from falaj.records.monitoring.monitors import Alert, AlertState, Monitor
from falaj.records.monitoring.sketches import DriftVerdict
from falaj.records.serving.endpoints import DeployedEndpoint
from falaj.sdk.platform import Platform

LISTED = 1000
FOLLOW_S = 5.0
"""Monitors are loaded again at most this often while rows come in."""
SHOWN_ALERTS = 50
ACKNOWLEDGE = "monitoring.acknowledge"
COLUMNS = (
    TableColumn("name", "Monitor", "link", sortable=True),
    TableColumn("state", "State", "state", sortable=True),
    TableColumn("endpoint", "Endpoint", sortable=True),
    TableColumn("verdicts", "Last verdicts"),
    TableColumn("rows", "Rows seen", "number"),
    TableColumn("reference", "Reference rows", "number"),
    TableColumn("created", "Created", "time", sortable=True),
)
VERDICTS = {DriftVerdict.DRIFT: "drift", DriftVerdict.NONE: "no drift", DriftVerdict.TOO_FEW: "too few rows"}
ALERT_TONES = {AlertState.OPEN: BAD, AlertState.ACKNOWLEDGED: WAITING, AlertState.ENDED: GOOD}


@dataclass(frozen=True)
class MonitorLine:
    """A monitor in the list."""

    id: str
    name: str
    state: str
    endpoint: str
    verdicts: str
    rows: str
    reference: str
    created: str


@dataclass(frozen=True)
class AlertLine:
    """An alert: what it says, and what it triggered."""

    id: str
    monitor: str
    words: str
    detail: str
    state: str
    tone: str
    raised: str
    triggered: tuple[str, ...]
    can_acknowledge: bool


@dataclass(frozen=True)
class MonitoringView:
    lines: tuple[MonitorLine, ...]
    alerts: tuple[AlertLine, ...]


def monitoring_view(
    monitors: Sequence[Monitor],
    alerts: Sequence[Alert],
    endpoints: Sequence[DeployedEndpoint],
    pipelines: Sequence[StoredPipeline],
    *,
    times: Times,
) -> MonitoringView:
    """Return the monitors by name, and the alerts, newest first."""
    served: dict[str, str] = {each.id: each.name for each in endpoints}
    names: dict[str, str] = {each.id: each.name for each in monitors}
    return MonitoringView(
        lines=tuple(
            MonitorLine(
                id=each.id,
                name=each.name,
                state=monitor_state(each),
                endpoint=served.get(each.endpoint, each.endpoint),
                verdicts=verdict_words(each),
                rows=f"{sum(version.rows for version in each.versions):,}",
                reference=f"{each.reference_rows:,}",
                created=times.moment(each.created_at),
            )
            for each in sorted(monitors, key=lambda each: each.name)
        ),
        alerts=alert_lines(alerts, names, served, pipelines, times=times),
    )


def monitor_state(monitor: Monitor) -> str:
    """Return whether an alert is open, all is well, or nothing was judged yet."""
    if monitor.alert is not None:
        return "alert"
    return "ok" if any(version.verdict for version in monitor.versions) else "waiting"


def verdict_words(monitor: Monitor) -> str:
    """Return the last verdict on each version."""
    words = (
        f"version {each.version}: {VERDICTS[each.verdict] if each.verdict else 'not judged yet'}"
        for each in monitor.versions
    )
    return ", ".join(words) or "no rows yet"


def alert_lines(
    alerts: Sequence[Alert],
    monitors: Mapping[str, str],
    endpoints: Mapping[str, str],
    pipelines: Sequence[StoredPipeline],
    *,
    times: Times,
) -> tuple[AlertLine, ...]:
    """Return alerts, newest first; `monitors` and `endpoints` are names by id."""
    newest = sorted(alerts, key=lambda each: each.raised_at, reverse=True)[:SHOWN_ALERTS]
    return tuple(
        AlertLine(
            id=each.id,
            monitor=monitors.get(each.monitor, each.monitor),
            words=each.words,
            detail=f"version {each.version}, columns {', '.join(each.columns)}; {each.windows} drifted "
            f"{'window' if each.windows == 1 else 'windows'} until {times.moment(each.last_until)}"
            + (f"; acknowledged by {each.acknowledged_by}" if each.acknowledged_by else "")
            + (f"; ended {times.moment(each.ended_at)}" if each.ended_at else ""),
            state=str(each.state),
            tone=ALERT_TONES.get(each.state, IDLE),
            raised=times.moment(each.raised_at),
            triggered=_triggered(each, endpoints.get(each.endpoint, ""), pipelines, times),
            can_acknowledge=each.state is AlertState.OPEN,
        )
        for each in newest
    )


def _triggered(
    alert: Alert, endpoint: str, pipelines: Sequence[StoredPipeline], times: Times
) -> tuple[str, ...]:
    """Return the retrainings that drift on the endpoint has started since the alert, if they are the last ones."""
    return tuple(
        f"retraining {each.definition.name}, started {times.moment(each.started_at)}"
        + (f": {each.verdict}" if each.verdict else "")
        for each in pipelines
        if each.cause == "drift"
        and each.definition.endpoint == endpoint
        and each.started_at is not None
        and each.started_at >= alert.raised_at
        and (alert.ended_at is None or each.started_at <= alert.ended_at)
    )


# ------------------------------------------------------------------------------------------- drawing


async def load(context: PageContext) -> MonitoringView:
    """Ask for monitors, alerts, and what names them."""
    here = context.workspace

    async def pipelines() -> Sequence[StoredPipeline]:
        try:
            return await context.ask(lambda p: p.pipelines.list(workspace=here, limit=LISTED).items)
        except (Denied, NotFound):
            return ()

    monitors, alerts, endpoints, started = await asyncio.gather(
        context.ask(lambda p: p.monitoring.list(workspace=here, limit=LISTED).items),
        context.ask(lambda p: p.monitoring.alerts(workspace=here, limit=LISTED).items),
        context.ask(lambda p: p.endpoints.list(workspace=here, limit=LISTED).items),
        pipelines(),
    )
    return monitoring_view(monitors, alerts, endpoints, started, times=context.times)


def _acknowledging(alert: str) -> Callable[[Platform], Alert]:
    return lambda platform: platform.monitoring.acknowledge(alert)


def draw_alerts(
    context: PageContext,
    alerts: Sequence[AlertLine],
    *,
    may: frozenset[str],
    after: Callable[[], Awaitable[None]],
) -> None:
    """Draw alerts, each with its button."""
    for each in alerts:
        with ui.element("div").classes("line").props("data-part=alert"):
            with ui.column().classes("tight grow"):
                with ui.row().style("gap: 12px; align-items: center"):
                    state_badge(each.state, tone=each.tone)
                    ui.label(f"{each.raised} · {each.monitor}").classes("muted small wrap")
                ui.label(each.words).classes("wrap")
                ui.label(each.detail).classes("muted small wrap")
                for words in each.triggered:
                    with ui.row().style("gap: 6px; align-items: flex-start; flex-wrap: nowrap"):
                        ui.icon("bolt").props("aria-hidden=true")
                        ui.link(words, context.href("pipelines")).classes("small wrap")
            if each.can_acknowledge:
                action_button(
                    context,
                    "Acknowledge",
                    ACKNOWLEDGE,
                    _acknowledging(each.id),
                    may=may,
                    done="The alert is acknowledged",
                    confirm="Acknowledge this alert? If the drift goes on, its next window raises a new one.",
                    icon="done",
                    after=after,
                )


async def draw(context: PageContext) -> None:
    """Draw the page."""
    ui.label("Monitoring").classes("title").props("role=heading aria-level=1")
    may = await context.may()

    async def loaded() -> MonitoringView:
        return await load(context)

    async def refresh() -> None:
        await region.refresh()

    def draw_view(view: MonitoringView) -> None:
        if not view.lines:
            empty_state(
                "No endpoint is watched in this workspace.",
                command="falaj monitoring watch ENDPOINT --reference TRAINING-SET",
                icon="monitor_heart",
            )
        else:
            rows = [
                TableRow(
                    each.id,
                    {column.key: getattr(each, column.key) for column in COLUMNS},
                    context.href("monitoring", each.name),
                )
                for each in view.lines
            ]
            data_table(COLUMNS, rows, title="Monitors")
        with ui.element("section").classes("panel").style("margin-top: 16px"):
            ui.label(f"Alerts ({len(view.alerts)})").classes("panel-title").props("role=heading aria-level=2")
            if not view.alerts:
                empty_state("No alert was raised.", icon="verified")
            draw_alerts(context, view.alerts, may=may, after=refresh)

    region = await context.region(
        loaded,
        draw_view,
        events=("monitoring.*", "pipelines.*"),
        objects=lambda view: [each.id for each in view.lines],
        gather_s=FOLLOW_S,
    )


PAGE = ConsolePage(
    "/w/{workspace}/monitoring",
    "Monitoring",
    draw,
    entry="monitoring",
    reads=("monitoring.list", "monitoring.alerts", "endpoints.list", "pipelines.list"),
    actions=(ACKNOWLEDGE,),
)
