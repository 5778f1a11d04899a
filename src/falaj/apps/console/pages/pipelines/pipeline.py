"""One pipeline: its graph with live states, its runs, approvals that wait, start, and a canary of a version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nicegui import events, ui

from falaj.apps.console.components.actions import action_button
from falaj.apps.console.components.sections import Cell, Crumb, facts, heading, panel, small_table
from falaj.apps.console.components.states import TONES, empty_state, state_badge
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.models.model import canaries_waiting
from falaj.apps.console.pages.pipelines.catalogue import EVENTS, FOLLOW_S, draw_waiting, find_work, triggers
from falaj.apps.console.pages.pipelines.steps import PipelineStep, pipeline_steps
from falaj.apps.console.times import Times, duration, number
from falaj.errors import Denied, NotFound
from falaj.records.control.pipelines import CanaryForecast, CanaryPlan, StoredPipeline
from falaj.records.control.workflows import WorkflowRun
from falaj.records.governance.events import Event
from falaj.records.registry import ModelVersion
from falaj.sdk.platform import Platform

STARTED = "pipelines.start"
SHOWN_RUNS, OFFERED = 20, 50
WORSE = (0.0, 2.0)
"""How much worse the version of a forecast is, in multiples of the margins."""
METRICS = {"error_rate": "error rate", "latency": "slow requests", "score": "score"}


@dataclass(frozen=True)
class PipelineRecords:
    """What the page is made from; `starts` are events, oldest first. None where the person may not see it."""

    found: StoredPipeline
    starts: Sequence[Event]
    work: Mapping[str, WorkflowRun]
    versions: Sequence[ModelVersion]
    forecast: CanaryPlan | None


@dataclass(frozen=True)
class PipelineRun:
    id: str
    started: str
    by: str
    state: str
    words: str
    took: str


@dataclass(frozen=True)
class PipelineView:
    name: str
    id: str
    words: str
    steps: tuple[PipelineStep, ...]
    about: tuple[tuple[str, str], ...]
    canary: tuple[tuple[str, str], ...]
    runs: tuple[PipelineRun, ...]
    waiting: tuple[tuple[str, str], ...]
    running: str
    """The id of the run that is under way."""
    endpoint: str
    model: str
    alias: str
    versions: tuple[str, ...]
    forecast: tuple[tuple[str, str, str, str], ...]
    """Metric, how good the version is, the expected verdict, and after how many requests and how long."""
    assumed: str


def pipeline_view(records: PipelineRecords, *, times: Times) -> PipelineView:
    """Return what the page shows."""
    found, plan = records.found, records.found.definition
    newest = records.work.get(found.work or "")
    return PipelineView(
        name=plan.name,
        id=found.id,
        words=f"retrains {plan.model} and tries it on {plan.endpoint}",
        steps=pipeline_steps(plan, newest),
        about=(
            ("started by", triggers(plan)),
            ("on behalf of", found.applied_by),
            ("rows", f"the last {duration(plan.window)} of {plan.spine}"),
            ("queue", plan.job.queue),
            ("approval within", duration(plan.approval_within)),
            ("defined", times.moment(found.created_at)),
            ("id", found.id),
        ),
        canary=(
            ("share of requests", f"{plan.canary.share} %"),
            ("at least", f"{number(plan.canary.requests)} requests and {number(plan.canary.labels)} labels"),
            ("at most", duration(plan.canary.longest)),
            ("false rollback", f"{plan.canary.false_rollback:.2%} at most"),
            ("false promotion", f"{plan.canary.false_promotion:.2%} at most"),
        ),
        runs=_runs(records, times),
        waiting=tuple(canaries_waiting([*records.work.values()])),
        running=newest.id if newest is not None and not newest.state.ended else "",
        endpoint=plan.endpoint,
        model=plan.model,
        alias=plan.alias,
        versions=tuple(each.reference for each in records.versions),
        forecast=()
        if records.forecast is None
        else tuple(_forecast(each) for each in records.forecast.forecasts),
        assumed="" if records.forecast is None else ", ".join(records.forecast.assumed).replace("_", " "),
    )


def started_work(found: StoredPipeline, starts: Sequence[Event]) -> dict[str, Event | None]:
    """Return the ids of a pipeline's runs, newest first, with the events of their starts."""
    mine = [each for each in starts if found.id in each.data.get("objects", ())]
    runs: dict[str, Event | None] = {}
    if found.work is not None and all(each.subject != found.work for each in mine):
        runs[found.work] = None
    for each in reversed(mine):
        runs[each.subject] = each
    return dict([*runs.items()][:SHOWN_RUNS])


def _runs(records: PipelineRecords, times: Times) -> tuple[PipelineRun, ...]:
    shown = []
    for ident, event in started_work(records.found, records.starts).items():
        run = records.work.get(ident)
        if run is None:
            continue
        cause = (run.result or {}).get("cause") or (
            records.found.cause if ident == records.found.work else None
        )
        who = "" if event is None else event.caller or ""
        shown.append(
            PipelineRun(
                id=ident,
                started=times.moment(run.created_at),
                by=", ".join(part for part in (str(cause or ""), who) if part) or "–",
                state=run.state.value,
                words=_words(run),
                took="–" if run.ended_at is None else duration(run.ended_at - run.created_at),
            )
        )
    return tuple(shown)


def _words(run: WorkflowRun) -> str:
    verdict = (run.result or {}).get("verdict") or {}
    return run.error or str(verdict.get("words") or "") or run.doing or "–"


def _forecast(each: CanaryForecast) -> tuple[str, str, str, str]:
    worse = "as good" if each.worse_by == 0 else f"worse by {number(each.worse_by)}"
    takes = "" if each.takes is None else f", {duration(each.takes)}"
    return (
        METRICS.get(each.metric, each.metric),
        worse,
        each.outcome.value.replace("_", " "),
        "–" if each.requests is None else f"{number(each.requests)} requests{takes}",
    )


# ------------------------------------------------------------------------------------------- drawing


def read_records(platform: Platform, workspace: str, reference: str) -> PipelineRecords:
    """Ask the platform for all that the page is made from."""
    found = platform.pipelines.show(reference)
    plan = found.definition
    starts = _starts(platform, workspace)
    work = find_work(platform, [*started_work(found, starts)])
    try:
        versions = platform.models.versions(f"{workspace}/{plan.model}", limit=OFFERED).items
    except (Denied, NotFound):  # the first run makes the model
        versions = ()
    try:
        forecast = platform.pipelines.plan_canary(
            f"{workspace}/{plan.endpoint}", plan=plan.canary, worse=WORSE
        )
    except (Denied, NotFound):
        forecast = None
    return PipelineRecords(found, starts, work, versions, forecast)


def _starts(platform: Platform, workspace: str) -> list[Event]:
    found: list[Event] = []
    cursor = ""
    while True:
        page = platform.events.list(types=(STARTED,), workspace=workspace, after=cursor, limit=1000)
        found += page.items
        if page.next is None:
            return found
        cursor = page.next


class PipelinePage:
    """An open page of a pipeline; what is chosen for a canary stays while the page is drawn anew."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.name = context.params["pipeline"]
        self.may: frozenset[str] = frozenset()
        self.version: str | None = None
        self.share: int | None = None

    async def load(self) -> PipelineView:
        context, reference = self.context, f"{self.context.workspace}/{self.name}"
        records = await context.ask(lambda p: read_records(p, context.workspace, reference))
        view = pipeline_view(records, times=context.times)
        endpoint = f"{context.workspace}/endpoint:{view.endpoint}"
        own, on_endpoint = await context.may(view.id), await context.may(endpoint)
        on_run = await context.may(view.running) if view.running else frozenset[str]()
        self.may = (
            (own & {"pipelines.start"})
            | (on_endpoint & {"pipelines.canary"})
            | (on_run & {"workflows.cancel"})
        )
        self.share = self.share or records.found.definition.canary.share
        return view

    async def draw(self) -> None:
        self.region = await self.context.region(
            self.load, self.show, events=EVENTS, objects=lambda view: (view.id,), gather_s=FOLLOW_S
        )

    async def refresh(self) -> None:
        await self.region.refresh()

    def show(self, view: PipelineView) -> None:
        heading(view.name, above=[Crumb("Pipelines", self.context.href("pipelines"))], words=view.words)
        with ui.element("div").classes("stack"):
            with panel("Steps"):
                self._steps(view)
                with ui.element("div").classes("toolbar gap-above"):
                    self._buttons(view)
            if view.waiting:
                with panel("Approvals that wait"):
                    draw_waiting(self.context, view.waiting)
            with panel("Runs"):
                self._runs(view)
            with ui.element("div").classes("columns flush"):
                with panel("Definition"):
                    facts(view.about, mono=("id",))
                with panel("Canary"):
                    facts(view.canary)
                    self._canary(view)

    def _steps(self, view: PipelineView) -> None:
        with ui.element("ol").classes("flow"):
            for step in view.steps:
                with ui.element("li").classes("flow-item") as item:
                    item.props["data-step"] = step.key
                    holder = ui.link(target=self.context.href(*step.page)) if step.page else ui.element("div")
                    with holder.classes("box"):
                        ui.label(step.title).classes("box-title")
                        state_badge(step.state, tone=step.tone)
                        ui.label(step.subject).classes("muted small wrap")

    def _buttons(self, view: PipelineView) -> None:
        if view.running:
            action_button(
                self.context,
                "Cancel the run",
                "workflows.cancel",
                lambda p: p.workflows.cancel(view.running),
                may=self.may,
                done="The run stops before its next step.",
                confirm=f"Cancel the run of {view.name}? What its finished steps made stays; a canary returns all "
                "requests to the champion.",
                after=self.refresh,
            )
            return
        action_button(
            self.context,
            "Start",
            "pipelines.start",
            lambda p: p.pipelines.start(view.id),
            may=self.may,
            done=f"{view.name} is started.",
            icon="play_arrow",
            confirm=f"Start {view.name}? It makes a training set, trains and registers a version of {view.model}, "
            f"serves it to a share of the requests of {view.endpoint}, and promotes it to {view.alias} or rolls it "
            "back.",
            after=self.refresh,
        )

    def _runs(self, view: PipelineView) -> None:
        if not view.runs:
            empty_state(
                "It was not started in the last 30 days.",
                command=f"falaj pipelines start {view.name}",
                icon="history",
            )
            return
        rows = [
            (each.started, each.by, Cell(each.state, tone=TONES.get(each.state, "")), each.words, each.took)
            for each in view.runs
        ]
        small_table(("started", "by", "state", "now, or the verdict", "took"), rows, title="Runs")

    def _canary(self, view: PipelineView) -> None:
        """Draw how soon a canary decides, and the form that starts one."""
        if view.forecast:
            heads = ("metric", "version is", "expected", "after")
            small_table(heads, view.forecast, title="How soon a canary decides")
            if view.assumed:
                ui.label(f"Assumed, as nothing was seen yet: {view.assumed}.").classes("muted small wrap")
        if "pipelines.canary" not in self.may or not view.versions:
            return
        self.version = self.version if self.version in view.versions else view.versions[0]
        with ui.element("div").classes("toolbar gap-above"):
            chosen = ui.select([*view.versions], value=self.version, label="Version")
            chosen.props("dense outlined").classes("chooser").on_value_change(self._choose_version)
            share = ui.number(label="Share of requests [%]", value=self.share, min=1, max=50, precision=0)
            share.props("dense outlined").classes("narrow").on_value_change(self._choose_share)
            action_button(
                self.context,
                "Start a canary",
                "pipelines.canary",
                lambda p: self._start_canary(p, view),
                may=self.may,
                done=f"The canary on {view.endpoint} is started.",
                confirm=f"Serve the chosen version beside the champion of {view.endpoint}? It answers the chosen share "
                f"of the requests until it is shown to be as good or worse; then all requests and {view.alias} go to "
                "it, or back to the champion.",
                after=self.refresh,
            )

    def _start_canary(self, platform: Platform, view: PipelineView) -> WorkflowRun:
        here = self.context.workspace
        plan = platform.pipelines.show(view.id).definition.canary
        return platform.pipelines.canary(
            f"{here}/{view.endpoint}",
            model=f"{here}/{self.version}",
            alias=view.alias,
            plan=plan.model_copy(update={"share": self.share or plan.share}),
        )

    def _choose_version(self, event: events.ValueChangeEventArguments[Any]) -> None:
        self.version = str(event.value)

    def _choose_share(self, event: events.ValueChangeEventArguments[Any]) -> None:
        self.share = int(event.value) if event.value else None


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await PipelinePage(context).draw()


PAGE = ConsolePage(
    "/w/{workspace}/pipelines/{pipeline}",
    "Pipeline",
    draw,
    entry="pipelines",
    reads=("pipelines.show", "pipelines.plan_canary", "workflows.show", "models.versions", "events.list"),
    actions=("pipelines.start", "pipelines.canary", "workflows.cancel"),
)
