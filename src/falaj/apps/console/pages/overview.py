"""The overview: the layers of the platform with their live state, the last alerts, and what changed today."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

from nicegui import ui

from falaj.apps.console.components.states import BAD, BUSY, GOOD, IDLE, WAITING, empty_state, state_badge
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.times import Times, size
from falaj.errors import Denied, NotFound
from falaj.records.governance.events import Event
from falaj.records.monitoring.monitors import Alert
from falaj.records.platform import PlatformFacts
from falaj.records.record import utc_now
from falaj.records.scheduling.accounting import QueueState
from falaj.records.scheduling.hardware import Machine
from falaj.records.training.jobs import Job, JobState
from falaj.sdk.platform import Platform

T = TypeVar("T")
COUNTED = 1000
"""Objects are counted up to this number."""
ALERTS, CHANGES = 5, 8


@dataclass(frozen=True)
class OverviewRecords:
    """What the overview is made from; none or empty where the person may not see it."""

    platform: PlatformFacts | None
    machines: Sequence[Machine]
    queues: Sequence[QueueState]
    running: Sequence[Job]
    waiting: Sequence[Job]
    counts: dict[str, int | None]
    """How many features, runs, models, endpoints, monitors, pipelines and webhooks there are."""
    alerts: Sequence[Alert]
    today: Sequence[Event]


@dataclass(frozen=True)
class Box:
    """A part of the platform: its state, a figure with its unit, and where its page is."""

    title: str
    tone: str
    state: str
    figure: str = ""
    share: float | None = None
    """How much of it is in use, from 0 to 1."""
    page: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layer:
    name: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Line:
    """A line of a list: words, who or what, and when."""

    words: str
    detail: str
    at: str
    page: tuple[str, ...] = ()


@dataclass(frozen=True)
class OverviewView:
    layers: tuple[Layer, ...]
    alerts: tuple[Line, ...]
    changes: tuple[Line, ...]
    changed: int


def overview(records: OverviewRecords, *, times: Times) -> OverviewView:
    """Return what the overview shows."""
    return OverviewView(
        layers=(
            Layer("Integration", _integration(records)),
            Layer("Services", _services(records)),
            Layer("Orchestration", _orchestration(records)),
            Layer("Hardware", _hardware(records.machines)),
        ),
        alerts=tuple(
            Line(
                each.words,
                f"{each.state}, version {each.version}",
                times.moment(each.raised_at),
                ("monitoring",),
            )
            for each in list(records.alerts)[: -ALERTS - 1 : -1]
        ),
        changes=_changes(records.today, times),
        changed=len(records.today),
    )


def _integration(records: OverviewRecords) -> tuple[Box, ...]:
    up = records.platform is not None
    state = (GOOD, "up") if up else (BAD, "not reached")
    webhooks = records.counts.get("webhooks")
    return (
        Box(
            "REST API and MLflow API",
            *state,
            figure=f"version {records.platform.version}" if records.platform else "",
        ),
        Box("Command line, Python", *state, figure="same operations"),
        Box("Webhooks", IDLE if not webhooks else GOOD, _counted(webhooks, "receiver"), page=("governance",)),
    )


def _services(records: OverviewRecords) -> tuple[Box, ...]:
    alerts = [each for each in records.alerts if each.ended_at is None]
    return (
        _service(records, "features", "Features", "view"),
        _service(records, "runs", "Experiments", "experiment"),
        _service(records, "models", "Models", "model"),
        _service(records, "endpoints", "Endpoints", "endpoint"),
        Box("Monitoring", BAD, _counted(len(alerts), "open alert"), page=("monitoring",))
        if alerts
        else _service(records, "monitoring", "Monitoring", "monitor"),
        _service(records, "pipelines", "Pipelines", "pipeline"),
    )


def _service(records: OverviewRecords, key: str, title: str, noun: str) -> Box:
    count = records.counts.get(key)
    return Box(title, GOOD if count else IDLE, _counted(count, noun), page=(key,))


def _orchestration(records: OverviewRecords) -> tuple[Box, ...]:
    controller = records.platform.controller if records.platform else None
    borrowed = sum(each.borrowed.gpus > 0 or each.borrowed.cpus > 0 for each in records.queues)
    return (
        Box("Controller", GOOD if controller else BAD, "acts" if controller else "none acts"),
        Box(
            "Queues",
            GOOD,
            _counted(len(records.queues), "queue"),
            figure=f"{borrowed} borrowing" if borrowed else "",
            page=("queues",),
        ),
        Box(
            "Running jobs",
            BUSY if records.running else IDLE,
            _counted(len(records.running), "job"),
            page=("jobs",),
        ),
        Box(
            "Waiting jobs",
            WAITING if records.waiting else IDLE,
            _counted(len(records.waiting), "job"),
            page=("jobs",),
        ),
    )


def _hardware(machines: Sequence[Machine]) -> tuple[Box, ...]:
    there = [each for each in machines if not each.is_lost]
    lost, cordoned = len(machines) - len(there), sum(each.cordon is not None for each in there)
    cpus, gpus = sum(each.node.cpus for each in there), sum(len(each.node.gpus) for each in there)
    memory = sum(each.node.memory_bytes for each in there)
    free_cpus, free_gpus = sum(each.free.cpus for each in there), sum(each.free.gpus for each in there)
    free_memory = sum(each.free.memory_bytes for each in there)
    words = _counted(len(there), "node") + (f", {lost} lost" if lost else "")
    words += f", {cordoned} cordoned" if cordoned else ""
    return (
        Box("Nodes", BAD if lost or not there else GOOD, words, page=("jobs",)),
        _resource("CPUs", cpus - free_cpus, cpus, f"{cpus - free_cpus} of {cpus} cores held"),
        _resource(
            "GPUs", gpus - free_gpus, gpus, f"{gpus - free_gpus} of {gpus} held" if gpus else "none here"
        ),
        _resource(
            "Memory", memory - free_memory, memory, f"{size(memory - free_memory)} of {size(memory)} held"
        ),
    )


def _resource(title: str, held: float, whole: float, words: str) -> Box:
    share = held / whole if whole else None
    return Box(title, IDLE if not whole else BUSY if held else GOOD, words, share=share, page=("queues",))


def _changes(events: Sequence[Event], times: Times) -> tuple[Line, ...]:
    """Return the last changes, newest first; the same change by the same caller several times in a row is one line."""
    found: list[tuple[Line, int]] = []
    for event in reversed(events):
        line = _change(event, times)
        if found and (line.words, line.detail) == (found[-1][0].words, found[-1][0].detail):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        elif len(found) == CHANGES:
            break
        else:
            found.append((line, 1))
    return tuple(
        line if count == 1 else replace(line, detail=f"{line.detail}, {count:,} times")
        for line, count in found
    )


def _change(event: Event, times: Times) -> Line:
    group, _, verb = event.type.removeprefix("falaj.").partition(".")
    words = f"{group} {verb.replace('_', ' ')}: {event.name or event.subject}"
    return Line(words, event.caller or "the platform", times.clock(event.at))


def _counted(count: int | None, noun: str) -> str:
    if count is None:
        return "not shown to you"
    more = "+" if count >= COUNTED else ""
    return f"{count:,}{more} {noun}{'' if count == 1 else 's'}" if count else "none"


# ------------------------------------------------------------------------------------------- drawing


async def load(context: PageContext) -> OverviewView:
    """Ask the platform, and return what the page shows."""
    here, since = context.workspace, context.times.midnight(utc_now())
    records = await context.ask(lambda p: read_records(p, here, since))
    return overview(records, times=context.times)


def read_records(p: Platform, here: str, since: datetime) -> OverviewRecords:
    """Ask for all that the overview is made from, without what the person may not see."""
    running, queued = JobState.RUNNING, JobState.QUEUED
    return OverviewRecords(
        platform=_seen(lambda: p.platform.status()),
        machines=_seen(lambda: p.nodes.list()) or (),
        queues=_seen(lambda: p.queues.list(limit=COUNTED).items) or (),
        running=_seen(lambda: p.jobs.list(state=running, workspace=here, limit=COUNTED).items) or (),
        waiting=_seen(lambda: p.jobs.list(state=queued, workspace=here, limit=COUNTED).items) or (),
        counts={
            "features": _seen(lambda: len(p.features.list(workspace=here, limit=COUNTED).items)),
            "runs": _seen(lambda: len(p.experiments.list(workspace=here, limit=COUNTED).items)),
            "models": _seen(lambda: len(p.models.list(workspace=here, limit=COUNTED).items)),
            "endpoints": _seen(lambda: len(p.endpoints.list(workspace=here, limit=COUNTED).items)),
            "monitoring": _seen(lambda: len(p.monitoring.list(workspace=here, limit=COUNTED).items)),
            "pipelines": _seen(lambda: len(p.pipelines.list(workspace=here, limit=COUNTED).items)),
            "webhooks": _seen(lambda: len(p.webhooks.list(workspace=here, limit=COUNTED).items)),
        },
        alerts=_seen(lambda: p.monitoring.alerts(workspace=here, limit=COUNTED).items) or (),
        today=_seen(lambda: p.events.list(since=since, workspace=here, limit=COUNTED).items) or (),
    )


def _seen(call: Callable[[], T]) -> T | None:
    """Return what an operation answers; none if the person may not perform it."""
    try:
        return call()
    except (Denied, NotFound):
        return None


def draw_overview(context: PageContext, view: OverviewView) -> None:
    with ui.element("div").classes("layers"):
        for layer in view.layers:
            with ui.element("section").classes("layer").props(f"aria-label='{layer.name}'"):
                ui.label(layer.name).classes("layer-name")
                with ui.element("div").classes("boxes"):
                    for box in layer.boxes:
                        _draw_box(context, box)
    with ui.element("div").classes("columns"):
        with ui.element("section").classes("panel"):
            ui.label("Last alerts").classes("panel-title").props("role=heading aria-level=2")
            if not view.alerts:
                empty_state(
                    "No alert was raised.", command="falaj monitoring watch ENDPOINT", icon="verified"
                )
            _draw_lines(context, view.alerts)
        with ui.element("section").classes("panel"):
            ui.label(f"Changed today ({view.changed})").classes("panel-title").props(
                "role=heading aria-level=2"
            )
            if not view.changes:
                empty_state("Nothing was changed today.", command="falaj train train.py", icon="history")
            _draw_lines(context, view.changes)


def _draw_box(context: PageContext, box: Box) -> None:
    holder = ui.link(target=context.href(*box.page)) if box.page else ui.element("div")
    with holder.classes("box"):
        ui.label(box.title).classes("box-title")
        state_badge(box.state, tone=box.tone)
        if box.share is not None:
            percent = round(100 * box.share)
            with (
                ui.element("div")
                .classes("gauge")
                .props(
                    f"role=progressbar aria-valuemin=0 aria-valuemax=100 aria-valuenow={percent} aria-label='in use'"
                )
            ):
                ui.element("div").classes("gauge-fill").style(f"width: {percent}%")
        if box.figure:
            ui.label(box.figure).classes("muted small")


def _draw_lines(context: PageContext, lines: Sequence[Line]) -> None:
    for line in lines:
        with ui.element("div").classes("line"):
            ui.label(line.at).classes("muted small mono at")
            with ui.column().classes("tight grow"):
                ui.label(line.words).classes("clip")
                ui.label(line.detail).classes("muted small clip")


async def draw(context: PageContext) -> None:
    """Draw the page; every event of the workspace may change it."""
    ui.label("Overview").classes("title").props("role=heading aria-level=1")

    async def loaded() -> OverviewView:
        return await load(context)

    await context.region(
        loaded, lambda view: draw_overview(context, view), events=("*",), every_s=30, gather_s=2
    )


PAGE = ConsolePage(
    "/w/{workspace}",
    "Overview",
    draw,
    entry="overview",
    reads=("platform.status", "nodes.list", "queues.list", "jobs.list", "monitoring.alerts", "events.list"),
)
