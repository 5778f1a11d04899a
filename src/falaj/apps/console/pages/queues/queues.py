"""The queues: what each holds of its quota and borrows, the fair shares, who waits, budgets and history."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from nicegui import ui

from falaj.apps.console.charts.bars import Bar, bar_chart
from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.palette import palette
from falaj.apps.console.components.states import empty_state
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.jobs.table import asks_for, queue_words, readable_machines
from falaj.apps.console.pages.platform_events import follow_platform
from falaj.apps.console.pages.queues.budgets import BudgetLine, budget_lines, draw_budget_form, draw_budgets
from falaj.apps.console.pages.queues.what_if import draw_what_if
from falaj.apps.console.times import Times, number, size
from falaj.errors import Denied, NotFound
from falaj.records.record import utc_now
from falaj.records.scheduling.accounting import BudgetState, PastAttempt, QueueState
from falaj.records.scheduling.hardware import Machine
from falaj.records.scheduling.snapshot import Quota
from falaj.records.training.jobs import Job, JobState
from falaj.sdk.platform import Platform

GIB = 1 << 30
HISTORY = timedelta(days=7)
HISTORY_ATTEMPTS = 20_000
PLATFORM = "platform"
QUEUE_COLUMNS = (
    TableColumn("name", "Queue"),
    TableColumn("quota", "Quota"),
    TableColumn("limit", "Limit"),
    TableColumn("held", "Held"),
    TableColumn("borrowed", "Borrowed"),
    TableColumn("running", "Running", "number"),
    TableColumn("waiting", "Waiting", "number"),
    TableColumn("weight", "Weight", "number"),
    TableColumn("score", "Score", "number"),
    TableColumn("workspaces", "Workspaces"),
)
WAITING_COLUMNS = (
    TableColumn("name", "Job", "link"),
    TableColumn("queue", "Queue"),
    TableColumn("asks", "Asks for"),
    TableColumn("since", "Waits since", "time"),
    TableColumn("reason", "Why"),
)


@dataclass(frozen=True)
class QueueRecords:
    """What the page is made from; `past` is none where the person may not see the history."""

    queues: Sequence[QueueState]
    waiting: Sequence[Job] = ()
    budgets: Sequence[BudgetState] = ()
    past: Sequence[PastAttempt] | None = None
    machines: Sequence[Machine] = ()


@dataclass(frozen=True)
class ResourceBars:
    """What queues hold of one resource: of their own, and borrowed, against the quota."""

    name: str
    unit: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class HistoryBars:
    """The hours of each day by queue."""

    queues: tuple[str, ...]
    bars: tuple[Bar, ...]
    unit: str


@dataclass(frozen=True)
class QueuesView:
    rows: tuple[TableRow, ...]
    resources: tuple[ResourceBars, ...]
    shares: tuple[Bar, ...]
    waiting: tuple[TableRow, ...]
    budgets: tuple[BudgetLine, ...]
    history: HistoryBars | None


def queues_view(records: QueueRecords, *, times: Times, base: str, now: datetime) -> QueuesView:
    """Return what the page shows; `base` is the address of the page of a job, without its id."""
    ordered = tree_order(records.queues)
    return QueuesView(
        rows=tuple(_row(queue, depth) for queue, depth in ordered),
        resources=_resources([queue for queue, _ in ordered], records.machines),
        shares=tuple(
            Bar(queue.name, (round(100 * queue.share, 2), round(100 * queue.history, 2)))
            for queue, _ in ordered
        ),
        waiting=tuple(_waiting(job, times, base) for job in sorted(records.waiting, key=_turn)),
        budgets=budget_lines(records.budgets, times),
        history=None if records.past is None else _history(records.past, times, now),
    )


def tree_order(queues: Sequence[QueueState]) -> list[tuple[QueueState, int]]:
    """Return the queues with their depth, each behind its parent."""
    known = {queue.name: queue for queue in queues}
    found: list[tuple[QueueState, int]] = []

    def add(queue: QueueState, depth: int) -> None:
        found.append((queue, depth))
        for child in queue.children:
            if child in known:
                add(known[child], depth + 1)

    for queue in queues:
        if queue.settings.parent not in known:
            add(queue, 0)
    return found


def _row(queue: QueueState, depth: int) -> TableRow:
    settings = queue.settings
    hidden = f" and {queue.unseen} more" if queue.unseen else ""
    cells = {
        "name": "— " * depth + queue.name,
        "quota": quota_words(settings.quota),
        "limit": "its quota" if settings.limit is None else quota_words(settings.limit),
        "held": _amount(queue.held.cpus, queue.held.gpus, queue.held.memory_bytes),
        "borrowed": _amount(queue.borrowed.cpus, queue.borrowed.gpus, queue.borrowed.memory_bytes),
        "running": f"{queue.running:,}",
        "waiting": f"{queue.waiting:,}",
        "weight": number(settings.weight),
        "score": f"{queue.score:.3f}",
        "workspaces": (", ".join(settings.workspaces) or ("" if hidden else "all")) + hidden,
    }
    return TableRow(queue.name, cells)


def quota_words(quota: Quota) -> str:
    """Return a quota as words: 8 GPUs, 64 CPUs; no bound if it has none."""
    return _amount(quota.cpus, quota.gpus, quota.memory_bytes, none="no bound", zero=True)


def _amount(
    cpus: int | None, gpus: float | None, memory: int | None, *, none: str = "–", zero: bool = False
) -> str:
    parts = [
        _counted(gpus, "GPU") if gpus or (zero and gpus is not None) else "",
        _counted(cpus, "CPU") if cpus or (zero and cpus is not None) else "",
        size(memory) if memory or (zero and memory is not None) else "",
    ]
    return ", ".join(part for part in parts if part) or none


def _counted(count: float | None, noun: str) -> str:
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def _resources(queues: Sequence[QueueState], machines: Sequence[Machine]) -> tuple[ResourceBars, ...]:
    has_gpus = any(machine.node.gpus for machine in machines)
    found = []
    for name, field, unit, scale in (
        ("GPUs", "gpus", "GPUs", 1.0),
        ("CPUs", "cpus", "CPUs", 1.0),
        ("Memory", "memory_bytes", "GiB", GIB),
    ):
        bars = tuple(_bar(queue, field, scale) for queue in queues)
        is_used = any(bar.limit or any(bar.parts) for bar in bars)
        if is_used or (field == "cpus") or (field == "gpus" and has_gpus):
            found.append(ResourceBars(name, unit, bars))
    return tuple(found)


def _bar(queue: QueueState, field: str, scale: float) -> Bar:
    held, borrowed = getattr(queue.held, field), getattr(queue.borrowed, field)
    quota = getattr(queue.settings.quota, field)
    own, beyond = round((held - borrowed) / scale, 3), round(borrowed / scale, 3)
    return Bar(queue.name, (own, beyond), None if quota is None else round(quota / scale, 3))


def _turn(job: Job) -> tuple[str, int, datetime]:
    return job.spec.queue, -job.spec.priority, job.submitted_at


def _waiting(job: Job, times: Times, base: str) -> TableRow:
    cells = {
        "name": job.name,
        "queue": queue_words(job.spec),
        "asks": asks_for(job.spec),
        "since": times.moment(job.submitted_at),
        "reason": job.reason or "",
    }
    return TableRow(job.id, cells, f"{base}/{job.id}")


def _history(past: Sequence[PastAttempt], times: Times, now: datetime) -> HistoryBars:
    """Return the hours of each of the last days by queue: GPU-hours if there were any, CPU-hours otherwise."""
    has_gpus = any(each.request.each.gpus for each in past)
    days = [times.day(now - timedelta(days=ago)) for ago in range(HISTORY.days, -1, -1)]
    hours: dict[tuple[str, str], float] = {}
    for each in past:
        resources = each.request.each
        gpus = resources.gpus * resources.gpu_milli / 1000
        held = each.request.replicas * (gpus if has_gpus else resources.cpus)
        for day, spent in _by_day(each.started_at, each.ended_at or now, times).items():
            key = (day, each.request.queue)
            hours[key] = hours.get(key, 0.0) + held * spent
    queues = tuple(sorted({each.request.queue for each in past}))
    bars = tuple(Bar(day, tuple(round(hours.get((day, queue), 0.0), 3) for queue in queues)) for day in days)
    return HistoryBars(queues, bars, "GPU-hours" if has_gpus else "CPU-hours")


def _by_day(begin: datetime, end: datetime, times: Times) -> Mapping[str, float]:
    """Return the hours between two moments by day of the person."""
    found: dict[str, float] = {}
    while begin < end:
        midnight = times.midnight(begin) + timedelta(days=1)
        until = min(end, midnight if midnight > begin else begin + timedelta(hours=1))
        found[times.day(begin)] = found.get(times.day(begin), 0.0) + (until - begin).total_seconds() / 3600
        begin = until
    return found


# ------------------------------------------------------------------------------------------- drawing


def read_queues(p: Platform, here: str, now: datetime, *, with_history: bool) -> QueueRecords:
    """Ask for the queues, and for what the person may see beside them."""
    waiting: Sequence[Job] = ()
    past: list[PastAttempt] | None = None
    with contextlib.suppress(Denied, NotFound):
        waiting = p.jobs.list(state=JobState.QUEUED, workspace=here, limit=200).items
    if with_history:
        with contextlib.suppress(Denied, NotFound):
            past = []
            for each in p.queues.history(since=now - HISTORY, until=now):
                past.append(each)
                if len(past) >= HISTORY_ATTEMPTS:
                    break
    return QueueRecords(
        p.queues.list(limit=1000).items, waiting, p.queues.budgets(), past, readable_machines(p)
    )


def draw_queues(context: PageContext, view: QueuesView) -> None:
    colours = palette(context.is_dark)
    height = 120 + 30 * len(view.rows)
    with ui.element("div").classes("columns"):
        for resource in view.resources:
            with _panel(f"{resource.name} held against the quota"):
                title = f"{resource.name} that each queue holds within its quota and borrows"
                options = bar_chart(
                    resource.bars,
                    ("within the quota", "borrowed"),
                    colours,
                    title=title,
                    unit=resource.unit,
                    limit_name="quota",
                )
                chart(options, height_px=height)
        with _panel("Fair shares"):
            title = "The share of the whole that each queue holds now, and has held lately"
            options = bar_chart(
                view.shares, ("held now", "held lately"), colours, title=title, unit="% of the whole"
            )
            chart(options, height_px=height)
    with _panel("Queues"):
        data_table(QUEUE_COLUMNS, view.rows, title="Queues")
        ui.label("The lowest score goes first: what is held and was held lately, by weight.").classes(
            "muted small"
        )
    with _panel(f"Waiting in this workspace ({len(view.waiting)})"):
        if view.waiting:
            data_table(WAITING_COLUMNS, view.waiting, title="Waiting jobs")
        else:
            empty_state("No job waits.", command="falaj train train.py --queue QUEUE", icon="hourglass_empty")
    if view.history is not None:
        _draw_history(context, view.history)
    with _panel("Budgets"):
        draw_budgets(view.budgets)


def _draw_history(context: PageContext, history: HistoryBars) -> None:
    with _panel("History of 7 days"):
        if not history.queues:
            ui.label("No job ran in the last 7 days.").classes("muted")
            return
        title = f"{history.unit} of each day by queue"
        options = bar_chart(
            history.bars, history.queues, palette(context.is_dark), title=title, unit=history.unit
        )
        chart(options, height_px=340)


def _panel(title: str) -> ui.element:
    panel = ui.element("section").classes("panel spaced")
    with panel:
        ui.label(title).classes("panel-title").props("role=heading aria-level=2")
    return panel


async def draw(context: PageContext) -> None:
    """Draw the page: the state of the queues, and the forms of those who may."""
    ui.label("Queues").classes("title").props("role=heading aria-level=1")
    may = await context.may(f"workspace:{PLATFORM}")

    async def load() -> QueuesView:
        now = utc_now().replace(second=0, microsecond=0)
        records = await context.ask(
            lambda p: read_queues(p, context.workspace, now, with_history="queues.history" in may)
        )
        return queues_view(records, times=context.times, base=context.href("jobs"), now=now)

    async def refresh() -> None:
        await region.refresh()

    region = await context.region(
        load, lambda view: draw_queues(context, view), events=("jobs.*", "queues.*")
    )
    follow_platform(context, ("queues.*", "nodes.*"), region)
    with ui.element("div").classes("toolbar spaced"):
        draw_budget_form(context, may, refresh)
    if "queues.what_if" in may:
        await draw_what_if(context)


PAGE = ConsolePage(
    "/w/{workspace}/queues",
    "Queues",
    draw,
    entry="queues",
    reads=("queues.list", "queues.budgets", "jobs.list", "nodes.list"),
    actions=("queues.set_budget", "queues.what_if", "queues.what_if_result", "queues.history"),
)
