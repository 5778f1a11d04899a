"""One job: its state and why, its log as it grows, hardware use, plan, profile, checkpoints and buttons."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.states import command_line, fact, state_badge
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.jobs.actions import ACTIONS, draw_actions, possible_actions
from falaj.apps.console.pages.jobs.log_view import LogView
from falaj.apps.console.pages.jobs.measurements import (
    MeasurementsView,
    draw_measurements,
    measurements_view,
    wanted_curves,
)
from falaj.apps.console.pages.jobs.table import asks_for, readable_machines
from falaj.apps.console.pages.jobs.timeline import gpu_names, lanes
from falaj.apps.console.times import Times, duration, number, size
from falaj.errors import Conflict, Denied, NotFound
from falaj.records.scheduling.accounting import UsageRow
from falaj.records.scheduling.hardware import Machine
from falaj.records.scheduling.snapshot import Explanation, priority_class
from falaj.records.tracking import MetricCurve, RunDetails
from falaj.records.training.jobs import Checkpoint, Job, JobState
from falaj.sdk.platform import Platform

STATE_S, MEASURED_S = 1.0, 10.0
"""The state and the measurements are loaded again at most this often."""
CHECKPOINT_COLUMNS = (
    TableColumn("step", "Step", "number"),
    TableColumn("size", "Size", "number"),
    TableColumn("parts", "Parts", "number"),
    TableColumn("blob", "Manifest", "mono"),
)
DIFF_CHARACTERS = 500


@dataclass(frozen=True)
class OneJobRecords:
    job: Job
    owner: str = ""
    explained: Explanation | None = None
    checkpoints: Sequence[Checkpoint] = ()
    machines: Sequence[Machine] = ()
    may: Collection[str] = ()


@dataclass(frozen=True)
class ProgressView:
    words: str
    share: float | None


@dataclass(frozen=True)
class ExplanationView:
    """Why a job waits, its position, and what would start it now."""

    words: str
    facts: tuple[tuple[str, str], ...]
    would_start: tuple[str, ...]


@dataclass(frozen=True)
class JobView:
    job: str
    name: str
    state: str
    note: str
    """What is happening to it now: that it is cancelled, preempted or moved."""
    reason: str
    ended: bool
    attempt: int
    run: str
    facts: tuple[tuple[str, str], ...]
    explained: ExplanationView | None
    checkpoints: tuple[TableRow, ...]
    outputs: tuple[tuple[str, str], ...]
    may: frozenset[str]


def job_view(records: OneJobRecords, *, times: Times) -> JobView:
    """Return what the page shows of the job itself."""
    job = records.job
    notes = {"is being cancelled": job.cancelling, "moves elsewhere": job.moving, "makes room": job.leaving}
    return JobView(
        job=job.id,
        name=job.name,
        state=str(job.state),
        note=next((words for words, holds in notes.items() if holds and not job.state.ended), ""),
        reason=job.reason or "",
        ended=job.state.ended,
        attempt=job.attempt,
        run=job.run,
        facts=_facts(records, times),
        explained=None if records.explained is None else _explained(records.explained, times),
        checkpoints=tuple(_checkpoint(each) for each in records.checkpoints),
        outputs=tuple((each.path, each.blob) for each in job.outputs),
        may=possible_actions(job, records.may),
    )


def _facts(records: OneJobRecords, times: Times) -> tuple[tuple[str, str], ...]:
    job, spec = records.job, records.job.spec
    gpus = gpu_names(records.machines)
    places = dict.fromkeys(lane for placed in job.placements for lane in lanes(placed, gpus))
    took = None if job.started_at is None or job.ended_at is None else job.ended_at - job.started_at
    found = {
        "Id": job.id,
        "Owner": records.owner or job.owner,
        "Queue": f"{spec.queue}, priority {priority_class(spec.priority)}",
        "Asks for": asks_for(spec) + (f", {size(spec.memory_bytes)}" if spec.memory_bytes else ""),
        "Runs" if not job.state.ended else "Ran": ", ".join(places),
        "Framework": f"{spec.framework}, {spec.world_size} process{'es' if spec.world_size > 1 else ''}",
        "Command": " ".join((spec.script or spec.module or "", *spec.args))[:DIFF_CHARACTERS],
        "Inputs": ", ".join(f"{name} = {given}" for name, given in spec.inputs.items()),
        "Submitted": times.moment(job.submitted_at),
        "Started": times.moment(job.started_at),
        "Ended": times.moment(job.ended_at),
        "Duration": duration(took),
        "Attempt": _attempts(job),
        "Exit code": "" if job.exit_code is None else str(job.exit_code),
        "Commit": (spec.origin.commit or "") if spec.origin else "",
        "Residency": job.label.describe(),
        "Limits": "; ".join(job.limits),
    }
    return tuple((name, value) for name, value in found.items() if value and value != "–")


def _attempts(job: Job) -> str:
    if not job.attempt:
        return ""
    preempted = f", preempted {job.preemptions} times" if job.preemptions else ""
    return f"{job.attempt}, at most {job.spec.retries} retries after failures{preempted}"


def progress_view(job: Job) -> ProgressView | None:
    """Return how far a job is; none where it does not tell."""
    found = job.progress
    if found is None:
        return None
    parts = [f"step {found.step:,}" + (f" of {found.total:,}" if found.total else "")]
    if found.loss is not None:
        parts.append(f"loss {number(found.loss)}")
    if found.rate is not None:
        parts.append(f"{number(found.rate)} steps/s")
    if found.left is not None and job.state is JobState.RUNNING:
        parts.append(f"{duration(found.left)} left")
    share = min(1.0, found.step / found.total) if found.total else None
    return ProgressView(", ".join(parts), share)


def _explained(found: Explanation, times: Times) -> ExplanationView:
    facts = {
        "Binding constraint": str(found.reason or ""),
        "Position": "" if found.position is None else f"{found.position} of {found.of}",
        "Share of its queue": ""
        if found.share is None
        else f"{found.share:.1%} by weight; the lowest goes first",
        "Starts at the latest": times.moment(found.expected_start) if found.expected_start else "",
    }
    return ExplanationView(
        found.words, tuple((name, value) for name, value in facts.items() if value), found.would_start
    )


def _checkpoint(found: Checkpoint) -> TableRow:
    cells = {
        "step": f"{found.step:,}",
        "size": size(found.size_bytes),
        "parts": str(len(found.parts)),
        "blob": found.manifest.blob,
    }
    return TableRow(str(found.step), cells)


# ------------------------------------------------------------------------------------------- drawing


def read_job(p: Platform, ident: str, actions: tuple[str, ...]) -> OneJobRecords:
    """Ask for the job, and for what the person may see and do of it."""
    job = p.jobs.show(ident)
    owner, explained, may = "", None, tuple[str, ...]()
    checkpoints: Sequence[Checkpoint] = ()
    with contextlib.suppress(Denied, NotFound):
        owner = p.users.show(job.owner).name
    with contextlib.suppress(Denied, NotFound, Conflict):
        explained = None if job.state.ended else p.jobs.explain(job.id)
    with contextlib.suppress(Denied, NotFound):
        checkpoints = p.jobs.checkpoints(job.id)
    with contextlib.suppress(Denied, NotFound):
        may = p.policies.allowed(actions, job.id)
    return OneJobRecords(job, owner, explained, checkpoints, readable_machines(p), may)


def read_measurements(p: Platform, ident: str, here: str) -> MeasurementsView:
    """Ask for the run of a job, the curves that tell about the hardware, and what the job has used."""
    job = p.jobs.show(ident)
    run: RunDetails | None = None
    curves: Sequence[MetricCurve] = ()
    with contextlib.suppress(Denied, NotFound):
        run = p.runs.show(job.run)
        if keys := wanted_curves(run):
            curves = p.runs.curves(job.run, tuple(keys), points=300)
    return measurements_view(run, curves, _used(p, job, here))


def _used(p: Platform, job: Job, here: str) -> UsageRow | None:
    if job.started_at is None:
        return None
    with contextlib.suppress(Denied, NotFound):
        lines = p.usage.show(by="job", since=job.submitted_at, workspace=here, limit=1000).lines
        return next((line for line in lines if line.id == job.id), None)
    return None


class JobPage:
    """The parts of an open page of a job that change."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.job = context.params["job"]
        self.view: JobView | None = None

    async def load(self) -> JobView:
        actions = self.context.page.actions
        records = await self.context.ask(lambda p: read_job(p, self.job, actions))
        return job_view(records, times=self.context.times)

    async def load_progress(self) -> ProgressView | None:
        """Ask for the job alone; where its state is another than the one that is shown, all is loaded again."""
        job = await self.context.ask(lambda p: p.jobs.show(self.job))
        if self.view is not None and self.view.state != job.state:
            await self.region.refresh()
        return progress_view(job)

    async def load_measurements(self) -> MeasurementsView:
        here = self.context.workspace
        return await self.context.ask(lambda p: read_measurements(p, self.job, here))

    async def draw(self) -> None:
        """Draw the page: an unknown job is an error of the whole page."""
        await self.context.ask(lambda p: p.jobs.show(self.job))
        self.region = await self.context.region(self.load, self.show, events=("jobs.*",), gather_s=STATE_S)
        with ui.element("section").classes("panel spaced"):
            ui.label("Log").classes("panel-title").props("role=heading aria-level=2")
            self.progress = await self.context.region(self.load_progress, draw_progress)
            self.log_box = ui.element("div")
            command_line(f"falaj jobs logs {self.job} --follow")
        self._follow_log()
        measured = await self.context.region(
            self.load_measurements, lambda view: draw_measurements(self.context, view)
        )
        live = self.context.live
        live(self.progress.refresh, events=("jobs.*",), objects=self._followed, gather_s=STATE_S)
        live(measured.refresh, events=("jobs.*",), objects=self._followed, gather_s=MEASURED_S)

    def _followed(self) -> tuple[str, ...]:
        """Return the job and its run until it has ended: progress and points make no event."""
        return (self.view.job, self.view.run) if self.view is not None and not self.view.ended else ()

    def _follow_log(self) -> None:
        self.log_box.clear()
        with self.log_box:
            LogView(self.context, lambda p: iter(p.jobs.logs(self.job, follow=True)))

    def show(self, view: JobView) -> None:
        """Draw all but the log and the measurements; a job that was retried has a new log."""
        if self.view is not None and self.view.ended and not view.ended:
            self._follow_log()
        self.view = view
        self._head(view)
        if view.explained is not None:
            self._explanation(view.explained)
        with ui.element("div").classes("columns"):
            with ui.element("section").classes("panel"):
                ui.label("Job").classes("panel-title").props("role=heading aria-level=2")
                with ui.element("dl").classes("facts"):
                    for name, value in view.facts:
                        fact(name, value, mono=name in ("Id", "Command", "Commit"))
            with ui.element("section").classes("panel"):
                ui.label("Checkpoints").classes("panel-title").props("role=heading aria-level=2")
                if view.checkpoints:
                    data_table(CHECKPOINT_COLUMNS, view.checkpoints, title="Checkpoints")
                else:
                    ui.label("None. A script saves them with fj.fit or fj.step.").classes("muted")
                ui.label("Outputs").classes("panel-title spaced").props("role=heading aria-level=2")
                if not view.outputs:
                    ui.label("None yet: the files in FALAJ_OUTPUTS, when the script succeeds.").classes(
                        "muted"
                    )
                for path, blob in view.outputs:
                    with ui.element("div").classes("line"):
                        ui.label(path).classes("grow wrap")
                        ui.label(blob).classes("muted small mono wrap")

    def _head(self, view: JobView) -> None:
        context = self.context
        ui.link("Jobs", context.href("jobs")).classes("small")
        with ui.element("div").classes("toolbar"):
            ui.label(view.name).classes("title flush wrap").props("role=heading aria-level=1")
            state_badge(view.state)
            if view.note:
                ui.label(view.note).classes("muted")
            ui.element("div").classes("grow")
            draw_actions(context, view.job, view.name, view.state, view.may, self.region_refresh)
        if view.reason:
            ui.label(view.reason).classes("wrap").props("data-part=reason")
        ui.link("Its run: metrics, parameters and artifacts", context.href("runs", view.run)).classes("small")

    async def region_refresh(self) -> None:
        await self.region.refresh()

    def _explanation(self, found: ExplanationView) -> None:
        with ui.element("section").classes("panel spaced").props("data-part=explain"):
            ui.label("Why it is where it is").classes("panel-title").props("role=heading aria-level=2")
            ui.label(found.words).classes("wrap")
            with ui.element("dl").classes("facts"):
                for name, value in found.facts:
                    fact(name, value)
            if found.would_start:
                ui.label("Each of these would start it now:").classes("strong small")
                for words in found.would_start:
                    ui.label(f"• {words}").classes("wrap")


def draw_progress(view: ProgressView | None) -> None:
    """Draw how far the job is, with a bar where the number of its steps is known."""
    if view is None:
        return
    ui.label(view.words).classes("strong").props("data-part=progress")
    if view.share is not None:
        percent = round(100 * view.share)
        bar = ui.element("div").classes("gauge")
        bar.props(
            f"role=progressbar aria-valuemin=0 aria-valuemax=100 aria-valuenow={percent} aria-label='Progress'"
        )
        with bar:
            ui.element("div").classes("gauge-fill").style(f"width: {percent}%")


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await JobPage(context).draw()


PAGE = ConsolePage(
    "/w/{workspace}/jobs/{job}",
    "Job",
    draw,
    entry="jobs",
    reads=(
        "jobs.show",
        "jobs.logs",
        "jobs.explain",
        "jobs.checkpoints",
        "runs.show",
        "runs.curves",
        "usage.show",
        "users.show",
        "nodes.list",
    ),
    actions=ACTIONS,
)
