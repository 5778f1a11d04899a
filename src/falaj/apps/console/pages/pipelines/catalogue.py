"""The pipelines of a workspace, with their last starts, and the approvals that they wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.listing import LISTED, fits, read_all, search_field
from falaj.apps.console.components.sections import heading, panel
from falaj.apps.console.components.states import WAITING, empty_state, state_badge
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.models.catalogue import number_of
from falaj.apps.console.pages.models.model import canaries_waiting
from falaj.apps.console.times import Times, duration, number
from falaj.errors import Denied, NotFound
from falaj.records.control.pipelines import Pipeline, StoredPipeline
from falaj.records.control.workflows import WorkflowRun
from falaj.sdk.platform import Platform

COLUMNS = (
    TableColumn("name", "Pipeline", kind="link", sortable=True),
    TableColumn("state", "Last run", kind="state", sortable=True),
    TableColumn("doing", "Now, or the verdict"),
    TableColumn("model", "Model", sortable=True),
    TableColumn("endpoint", "Endpoint", sortable=True),
    TableColumn("triggers", "Started by"),
    TableColumn("started", "Last start", sortable=True),
)
FOLLOW_S = 2.0
"""Pipelines are loaded again at most this often; a step of one that is running makes no event."""
EVENTS = ("pipelines.*", "models.approve", "models.promote", "endpoints.route", "jobs.*", "workflows.*")
FOLLOWED = 100
"""Pipelines whose last run is looked up."""


@dataclass(frozen=True)
class PipelineLine:
    id: str
    name: str
    state: str
    doing: str
    model: str
    endpoint: str
    triggers: str
    started: str


@dataclass(frozen=True)
class PipelineList:
    rows: tuple[PipelineLine, ...]
    total: int
    waiting: tuple[tuple[str, str], ...]
    """Versions and aliases for which a canary waits."""


def pipeline_list(
    found: Sequence[StoredPipeline], work: Mapping[str, WorkflowRun], *, words: str, times: Times
) -> PipelineList:
    """Return the pipelines that have every word in their name, model, endpoint or views, by name."""
    rows = [
        _row(each, work.get(each.work or ""), times)
        for each in found
        if fits(
            words,
            each.definition.name,
            each.definition.model,
            each.definition.endpoint,
            *each.definition.views,
        )
    ]
    return PipelineList(
        tuple(sorted(rows, key=lambda row: row.name)), len(found), tuple(canaries_waiting([*work.values()]))
    )


def _row(found: StoredPipeline, run: WorkflowRun | None, times: Times) -> PipelineLine:
    plan = found.definition
    said = "" if run is None else run.doing or run.error or ""
    return PipelineLine(
        id=found.id,
        name=plan.name,
        state="never started" if found.work is None else "unknown" if run is None else run.state.value,
        doing=said or found.verdict or "–",
        model=f"{plan.model}, {plan.alias}",
        endpoint=plan.endpoint,
        triggers=triggers(plan),
        started=times.moment(found.started_at) + (f" by {found.cause}" if found.cause else ""),
    )


def triggers(plan: Pipeline) -> str:
    """Say what starts a pipeline."""
    found = ["a person"]
    if plan.on_drift:
        found.append(f"drift, at most every {duration(plan.rest)}")
    if plan.every is not None:
        found.append(f"every {duration(plan.every)}")
    return "; ".join(found)


# ------------------------------------------------------------------------------------------- drawing


def find_work(platform: Platform, ids: Sequence[str]) -> dict[str, WorkflowRun]:
    """Return work by its id, as far as the person may see it."""
    found = {}
    for ident in ids:
        try:
            found[ident] = platform.workflows.show(ident)
        except (Denied, NotFound):
            continue
    return found


def draw_list(context: PageContext, view: PipelineList, words: str) -> None:
    if not view.total:
        empty_state(
            "No pipeline is defined here.",
            command="falaj pipelines apply pipeline.toml",
            icon="account_tree",
        )
        return
    if view.waiting:
        with panel("Approvals that wait"):
            draw_waiting(context, view.waiting)
    if not view.rows:
        empty_state(f"No pipeline has “{words}”. {number(view.total)} are here.", icon="search_off")
        return
    rows = [
        TableRow(
            each.name,
            {name: getattr(each, name) for name in PipelineLine.__dataclass_fields__},
            context.href("pipelines", each.name),
        )
        for each in view.rows
    ]
    ui.label(f"{number(len(rows))} of {number(view.total)} pipelines").classes("muted small")
    data_table(COLUMNS, rows, title="Pipelines")


def draw_waiting(context: PageContext, waiting: Sequence[tuple[str, str]]) -> None:
    """Draw links to the versions that wait for an approval, where the evidence is."""
    for version, alias in waiting:
        page = context.href("models", version.rpartition("@")[0], "versions", number_of(version), alias=alias)
        with ui.element("div").classes("tree-row"):
            state_badge("waits", tone=WAITING)
            ui.link(f"{version} for {alias}", page)
            ui.label("the evidence is beside the button").classes("muted small")


async def draw(context: PageContext) -> None:
    """Draw the page; a start and its end appear at once."""
    here = context.workspace
    chosen = {"words": context.query.get("q", "")}
    heading("Pipelines")

    def ask(platform: Platform) -> PipelineList:
        found = read_all(platform, lambda p, at: p.pipelines.list(workspace=here, after=at, limit=LISTED))
        work = find_work(platform, [each.work for each in found[:FOLLOWED] if each.work is not None])
        return pipeline_list(found, work, words=chosen["words"], times=context.times)

    async def loaded() -> PipelineList:
        return await context.ask(ask)

    async def search(words: str) -> None:
        chosen["words"] = words
        await region.refresh()

    with ui.element("div").classes("toolbar"):
        search_field(context, label="Search pipelines, models, endpoints, views", on_search=search)
    region = await context.region(
        loaded,
        lambda view: draw_list(context, view, chosen["words"]),
        events=EVENTS,
        objects=lambda view: [each.id for each in view.rows],
        gather_s=FOLLOW_S,
    )


PAGE = ConsolePage(
    "/w/{workspace}/pipelines",
    "Pipelines",
    draw,
    entry="pipelines",
    reads=("pipelines.list", "workflows.show"),
)
