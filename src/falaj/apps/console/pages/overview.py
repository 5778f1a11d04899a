"""The overview: the layers of the platform with their live state, the last alerts, and what changed today."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from nicegui import ui

from falaj.apps.console.components.states import BAD, BUSY, GOOD, IDLE, WAITING, empty_state, state_badge
from falaj.apps.console.page import ConsolePage, Drawing, PageContext
from falaj.apps.console.pages.platform_events import PLATFORM
from falaj.apps.console.sampling import sample_together
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
FOLLOW_S = 2.0
"""The overview is loaded again at most this often: many people look at it."""
SAMPLE_S = 30.0
"""How often is looked whether a controller acts, and which nodes there are."""


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
    fails = records.platform is not None and "controller" in records.platform.failing
    borrowed = sum(each.borrowed.gpus > 0 or each.borrowed.cpus > 0 for each in records.queues)
    return (
        Box(
            "Controller",
            GOOD if controller and not fails else BAD,
            "keeps failing" if fails else "acts" if controller else "none acts",
        ),
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


@dataclass(frozen=True)
class Part:
    """A part of the records: what it is read by, and the groups of operations that change it."""

    read: Callable[[Platform, str], Any]
    changed_by: tuple[str, ...]
    missing: Any = ()
    """What stands for it where the person may not see it."""


PARTS = {
    "platform": Part(lambda p, _: p.platform.status(), ("nodes",), None),
    "machines": Part(lambda p, _: p.nodes.list(), ("nodes", "jobs")),
    "queues": Part(lambda p, _: p.queues.list(limit=COUNTED).items, ("queues", "nodes", "jobs")),
    "running": Part(lambda p, here: _jobs(p, here, JobState.RUNNING), ("jobs",)),
    "waiting": Part(lambda p, here: _jobs(p, here, JobState.QUEUED), ("jobs",)),
    "alerts": Part(lambda p, here: p.monitoring.alerts(workspace=here, limit=COUNTED).items, ("monitoring",)),
}
COUNTS = {
    "features": Part(
        lambda p, here: len(p.features.list(workspace=here, limit=COUNTED).items), ("features",), None
    ),
    "runs": Part(
        lambda p, here: len(p.experiments.list(workspace=here, limit=COUNTED).items),
        ("experiments", "runs", "jobs", "studies"),
        None,
    ),
    "models": Part(
        lambda p, here: len(p.models.list(workspace=here, limit=COUNTED).items), ("models",), None
    ),
    "endpoints": Part(
        lambda p, here: len(p.endpoints.list(workspace=here, limit=COUNTED).items), ("endpoints",), None
    ),
    "monitoring": Part(
        lambda p, here: len(p.monitoring.list(workspace=here, limit=COUNTED).items), ("monitoring",), None
    ),
    "pipelines": Part(
        lambda p, here: len(p.pipelines.list(workspace=here, limit=COUNTED).items), ("pipelines",), None
    ),
    "webhooks": Part(
        lambda p, here: len(p.webhooks.list(workspace=here, limit=COUNTED).items), ("webhooks",), None
    ),
}


def _jobs(p: Platform, here: str, state: JobState) -> Sequence[Job]:
    return p.jobs.list(state=state, workspace=here, limit=COUNTED).items


def read_records(p: Platform, here: str, since: datetime) -> OverviewRecords:
    """Ask for all that the overview is made from, without what the person may not see."""
    empty = OverviewRecords(
        platform=None, machines=(), queues=(), running=(), waiting=(), counts={}, alerts=(), today=()
    )
    with suppress(Denied, NotFound):
        empty = replace(empty, today=p.events.list(since=since, workspace=here, limit=COUNTED).items)
    groups = {group for part in (*PARTS.values(), *COUNTS.values()) for group in part.changed_by}
    return read_again(p, here, empty, groups)


def read_again(p: Platform, here: str, known: OverviewRecords, groups: Collection[str]) -> OverviewRecords:
    """Ask for the parts that operations of these groups have changed; the others stay as they are known."""

    def read(parts: Mapping[str, Part]) -> dict[str, Any]:
        return {
            name: _seen(partial(part.read, p, here), part.missing)
            for name, part in parts.items()
            if not {*part.changed_by}.isdisjoint(groups)
        }

    return replace(known, counts=known.counts | read(COUNTS), **read(PARTS))


def group_of(event: Event) -> str:
    """Return the group of the operation that an event tells of, like `jobs`."""
    return event.type.removeprefix("falaj.").partition(".")[0]


def add_events(known: OverviewRecords, came: Sequence[Event], *, since: datetime) -> OverviewRecords:
    """Return the records with events that came since; the day, which `since` begins, may be another."""
    today = {each.id: each for each in (*known.today, *came) if each.at >= since}
    return replace(known, today=tuple(today.values())[-COUNTED:])


def _seen(call: Callable[[], T], missing: T) -> T:
    """Return what an operation answers; `missing` if the person may not perform it."""
    try:
        return call()
    except (Denied, NotFound):
        return missing


class OverviewPage:
    """The open overview. Many people look at it, so it asks again only for what an event has changed."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.records: OverviewRecords | None = None
        self.is_incomplete = True
        """Events may be missing: all is to be read."""
        self.came: list[Event] = []
        """The events of the workspace since the records were read."""
        self.groups: set[str] = set()
        """The groups of operations on the platform itself since then."""
        self.boxes: dict[str, Drawing[Box]] = {}

    @property
    def today(self) -> datetime:
        return self.context.times.midnight(utc_now())

    async def draw(self) -> None:
        context = self.context
        context.on_notices(self._note, events=("*",))
        self._draw_view(await self._load())
        context.live(self._refresh, events=("*",), gather_s=FOLLOW_S)
        context.on_notices(self._note_platform, events=("nodes.*", "queues.*"), workspace=PLATFORM)
        context.live(self._refresh, events=("nodes.*", "queues.*"), workspace=PLATFORM, gather_s=FOLLOW_S)
        sample_together(
            context, "platform", lambda p: (p.platform.status(), p.nodes.list()), self._take, every_s=SAMPLE_S
        )

    def _note(self, event: Event | None) -> None:
        if event is None:
            self.is_incomplete = True
        else:
            self.came.append(event)

    def _note_platform(self, event: Event | None) -> None:
        self.groups |= {"nodes", "queues"} if event is None else {group_of(event)}

    async def _load(self) -> OverviewView:
        here, since, known = self.context.workspace, self.today, self.records
        came, self.came = self.came, []
        groups, self.groups = self.groups | {group_of(each) for each in came}, set()
        if known is None or self.is_incomplete:
            self.is_incomplete = False
            self.records = await self.context.ask(lambda p: read_records(p, here, since))
        else:
            now = add_events(known, came, since=since)
            self.records = await self.context.ask(lambda p: read_again(p, here, now, groups))
        return overview(self.records, times=self.context.times)

    async def _refresh(self) -> None:
        if self.is_incomplete or self.came or self.groups:
            self._show(await self._load())

    def _take(self, found: tuple[PlatformFacts, Sequence[Machine]]) -> None:
        """Show whether a controller acts and which nodes there are: that ends without an event."""
        if self.records is not None:
            self.records = replace(self.records, platform=found[0], machines=found[1])
            self._show(overview(self.records, times=self.context.times))

    def _draw_view(self, view: OverviewView) -> None:
        with ui.element("div").classes("layers"):
            for layer in view.layers:
                with ui.element("section").classes("layer").props(f"aria-label='{layer.name}'"):
                    ui.label(layer.name).classes("layer-name")
                    with ui.element("div").classes("boxes"):
                        for box in layer.boxes:
                            self.boxes[box.title] = Drawing(self.context, partial(_draw_box, self.context))
        with ui.element("div").classes("columns"):
            with ui.element("section").classes("panel"):
                ui.label("Last alerts").classes("panel-title").props("role=heading aria-level=2")
                self.alerts = Drawing(self.context, _draw_alerts)
            with ui.element("section").classes("panel"):
                self.changed = ui.label().classes("panel-title").props("role=heading aria-level=2")
                self.changes = Drawing(self.context, _draw_changes)
        self._show(view)

    def _show(self, view: OverviewView) -> None:
        """Draw what is another than before."""
        for layer in view.layers:
            for box in layer.boxes:
                self.boxes[box.title].show(box)
        self.alerts.show(view.alerts)
        self.changed.set_text(f"Changed today ({view.changed})")
        self.changes.show(view.changes)


def _draw_alerts(alerts: Sequence[Line]) -> None:
    if not alerts:
        empty_state("No alert was raised.", command="falaj monitoring watch ENDPOINT", icon="verified")
    _draw_lines(alerts)


def _draw_changes(changes: Sequence[Line]) -> None:
    if not changes:
        empty_state("Nothing was changed today.", command="falaj train train.py", icon="history")
    _draw_lines(changes)


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


def _draw_lines(lines: Sequence[Line]) -> None:
    for line in lines:
        with ui.element("div").classes("line"):
            ui.label(line.at).classes("muted small mono at")
            with ui.column().classes("tight grow"):
                ui.label(line.words).classes("clip")
                ui.label(line.detail).classes("muted small clip")


async def draw(context: PageContext) -> None:
    """Draw the page; every event of the workspace may change it."""
    ui.label("Overview").classes("title").props("role=heading aria-level=1")
    await OverviewPage(context).draw()


PAGE = ConsolePage(
    "/w/{workspace}",
    "Overview",
    draw,
    entry="overview",
    reads=("platform.status", "nodes.list", "queues.list", "jobs.list", "monitoring.alerts", "events.list"),
)
