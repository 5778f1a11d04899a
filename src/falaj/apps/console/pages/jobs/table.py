"""The table of jobs: by state, filtered, with the last day on nodes and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from nicegui import ui

from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.grids import gantt
from falaj.apps.console.charts.palette import palette
from falaj.apps.console.components.states import empty_state, state_badge
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.jobs.timeline import DAY, DAY_JOBS, DayView, day_view
from falaj.apps.console.times import Times, duration, number
from falaj.errors import Denied, NotFound
from falaj.records.governance.identity import Principal
from falaj.records.record import utc_now
from falaj.records.scheduling.hardware import Machine
from falaj.records.scheduling.snapshot import WHOLE_GPU, priority_class
from falaj.records.training.jobs import Job, JobSpec, JobState
from falaj.sdk.platform import Platform

PAGE_ROWS = 100
FOLLOW_S = 2.0
"""Jobs are loaded again at most this often."""
COLUMNS = (
    TableColumn("name", "Job", "link", sortable=True),
    TableColumn("state", "State", "state", sortable=True),
    TableColumn("queue", "Queue", sortable=True),
    TableColumn("asks", "Asks for"),
    TableColumn("progress", "Progress"),
    TableColumn("submitted", "Submitted", "time", sortable=True),
    TableColumn("took", "Ran", "number"),
    TableColumn("owner", "Owner", sortable=True),
    TableColumn("reason", "Why"),
)


@dataclass(frozen=True)
class JobQuery:
    """What the address asks for."""

    state: str = ""
    text: str = ""
    after: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> JobQuery:
        state = query.get("state", "")
        return cls(state if state in [*JobState] else "", query.get("filter", ""), query.get("after", ""))

    def fields(self) -> dict[str, str]:
        """Return the same as parts of an address."""
        return {"state": self.state, "filter": self.text, "after": self.after}


@dataclass(frozen=True)
class JobsView:
    """The rows of one page, and the cursor of the next."""

    rows: tuple[TableRow, ...]
    following: str | None


def jobs_view(
    jobs: Sequence[Job],
    people: Sequence[Principal],
    query: JobQuery,
    *,
    following: str | None,
    times: Times,
    base: str,
) -> JobsView:
    """Return what the table shows; `base` is the address of the page of a job, without its id."""
    names = {str(each.id): each.name for each in people}
    wanted = [job for job in jobs if _matches(job, query.text, names)]
    return JobsView(tuple(_row(job, names, times, base) for job in wanted), following)


def _matches(job: Job, text: str, people: Mapping[str, str]) -> bool:
    words = text.lower().split()
    found = " ".join((job.name, job.id, job.spec.queue, people.get(job.owner, ""), job.node or "")).lower()
    return all(word in found for word in words)


def _row(job: Job, people: Mapping[str, str], times: Times, base: str) -> TableRow:
    cells = {
        "name": job.name,
        "state": str(job.state),
        "queue": queue_words(job.spec),
        "asks": asks_for(job.spec),
        "progress": progress_words(job),
        "submitted": times.moment(job.submitted_at),
        "took": duration(job.ended_at - job.started_at) if job.started_at and job.ended_at else "–",
        "owner": people.get(job.owner, job.owner),
        "reason": job.reason or "",
    }
    return TableRow(job.id, cells, f"{base}/{job.id}")


def queue_words(spec: JobSpec) -> str:
    """Return the queue of a job, and its priority unless that is the normal one."""
    priority = priority_class(spec.priority)
    return spec.queue if priority == "normal" else f"{spec.queue}, {priority}"


def asks_for(spec: JobSpec) -> str:
    """Return the resources of all nodes of a job: 2 × 4 CPUs, 1 GPU."""
    parts = [f"{spec.cpus} CPU{'s' if spec.cpus > 1 else ''}"]
    if spec.gpus:
        share = f"{spec.gpu_milli / WHOLE_GPU:g}" if spec.gpu_milli < WHOLE_GPU else str(spec.gpus)
        parts.append(f"{share} GPU{'s' if spec.gpus > 1 else ''}" + (f" {spec.gpu_profile or ''}".rstrip()))
    return (f"{spec.nodes} × " if spec.nodes > 1 else "") + ", ".join(parts)


def progress_words(job: Job) -> str:
    """Return the step, the loss and the remaining time, as far as they are known."""
    if job.progress is None:
        return "–"
    found = job.progress
    words = f"step {found.step:,}" + (f" of {found.total:,}" if found.total else "")
    words += f", loss {number(found.loss)}" if found.loss is not None else ""
    left = found.left if job.state is JobState.RUNNING else None
    return words + (f", {duration(left)} left" if left is not None else "")


# ------------------------------------------------------------------------------------------- drawing


def jobs_of_the_day(p: Platform, here: str, *, now: datetime) -> list[Job]:
    """Return the jobs that were submitted in the last day, and all that have not ended."""
    day: dict[str, Job] = {}
    after = ""
    while True:
        listed = p.jobs.list(workspace=here, after=after, limit=250)
        day |= {job.id: job for job in listed.items if job.submitted_at >= now - DAY}
        after = listed.next or ""
        if not after or len(day) >= DAY_JOBS or listed.items[-1].submitted_at < now - DAY:
            break
    for unfinished in (JobState.RUNNING, JobState.QUEUED):
        day |= {job.id: job for job in p.jobs.list(state=unfinished, workspace=here, limit=1000).items}
    return [*day.values()]


def running_jobs(view: JobsView) -> list[str]:
    """Return the jobs on the page that are running: their progress makes no event."""
    return [row.key for row in view.rows if row.cells["state"] == JobState.RUNNING]


def readable_machines(p: Platform) -> Sequence[Machine]:
    """Return the nodes; none where the person may not see them."""
    try:
        return p.nodes.list()
    except (Denied, NotFound):
        return ()


class JobsTable:
    """The table on an open page, and the controls that change its address and its rows."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.query = JobQuery.of(context.query)
        self.day: tuple[Sequence[Job], Sequence[Machine]] = (), ()

    async def load(self) -> JobsView:
        """Ask for one page of jobs."""
        here, query, context = self.context.workspace, self.query, self.context
        state = JobState(query.state) if query.state else None

        def ask(p: Platform) -> JobsView:
            page = p.jobs.list(state=state, workspace=here, after=query.after, limit=PAGE_ROWS)
            people = p.users.list(limit=1000).items
            return jobs_view(
                page.items,
                people,
                query,
                following=page.next,
                times=context.times,
                base=context.href("jobs"),
            )

        return await context.ask(ask)

    async def load_day(self) -> DayView:
        """Ask for the jobs of the last day."""
        here = self.context.workspace
        self.day = await self.context.ask(
            lambda p: (jobs_of_the_day(p, here, now=utc_now()), readable_machines(p))
        )
        return day_view(*self.day, now=utc_now())

    async def change(self, **changes: str) -> None:
        """Show other rows, and put them into the address; the back button leads back."""
        self.query = replace(self.query, **{"after": "", **changes})
        ui.navigate.history.push(self.context.href("jobs", **self.query.fields()))
        await self.region.refresh()

    async def draw(self) -> None:
        ui.label("Jobs").classes("title").props("role=heading aria-level=1")
        with ui.element("div").classes("toolbar"):
            field = ui.input("Filter", value=self.query.text, placeholder="name, id, queue, node or owner")
            field.props("dense outlined clearable debounce=300").classes("grow filter")
            field.on_value_change(lambda event: self.change(text=str(event.value or "").strip()))
        chips = ui.element("div").classes("toolbar").props("role=group aria-label='Jobs by state'")
        self.region = await self.context.region(
            self.load, self.show, events=("jobs.*",), objects=running_jobs, gather_s=FOLLOW_S
        )

        def show_day(view: DayView) -> None:
            chips.clear()
            with chips:
                self._states(view)
            self._day(view)

        day = await self.context.region(self.load_day, show_day, events=("jobs.*",), gather_s=FOLLOW_S)
        # The day goes on, from what is known: this asks for nothing.
        ui.timer(60, lambda: day.drawing.show(day_view(*self.day, now=utc_now())), immediate=False)

    def show(self, view: JobsView) -> None:
        is_filtered = bool(self.query.state or self.query.text or self.query.after)
        if not view.rows and not is_filtered:
            empty_state(
                "No job was submitted in this workspace yet.", command="falaj train train.py", icon="memory"
            )
            return
        if not view.rows:
            empty_state("No job matches the filter.", icon="filter_alt_off")
        else:
            data_table(COLUMNS, view.rows, title="Jobs").classes("jobs-table")
        with ui.element("div").classes("toolbar pager"):
            if self.query.after:
                ui.button("Newest jobs", on_click=lambda: self.change()).props("flat dense")
            if view.following is not None:
                following = view.following
                ui.button("Older jobs", on_click=lambda: self.change(after=following)).props("flat dense")

    def _states(self, view: DayView) -> None:
        for state, count in (("", sum(count for _, count in view.counts)), *view.counts):
            is_chosen = state == self.query.state
            target = self.context.href("jobs", state=state, filter=self.query.text)
            with ui.link(target=target).classes("chip" + (" chosen" if is_chosen else "")) as link:
                if state:
                    state_badge(state)
                else:
                    ui.label("all").classes("strong small")
                ui.label(f"{count:,}").classes("mono small")
            if is_chosen:
                link.props("aria-current=true")
        ui.label("in the last 24 hours").classes("muted small")

    def _day(self, view: DayView) -> None:
        with ui.element("section").classes("panel spaced"):
            ui.label("The last 24 hours by node and GPU").classes("panel-title").props(
                "role=heading aria-level=2"
            )
            if not view.spans:
                ui.label("No job of this workspace ran in the last 24 hours.").classes("muted")
                return
            title = "Jobs of the last 24 hours on nodes and GPUs, by state"
            options = gantt(view.spans, palette(self.context.is_dark), title=title, now_ms=view.now_ms)
            chart(options, height_px=min(700, 150 + 30 * len(options["yAxis"]["data"])))
            if view.is_cut:
                ui.label(f"The {DAY_JOBS:,} newest jobs are drawn.").classes("muted small")


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await JobsTable(context).draw()


PAGE = ConsolePage(
    "/w/{workspace}/jobs", "Jobs", draw, entry="jobs", reads=("jobs.list", "users.list", "nodes.list")
)
