"""Training sets: the list, and one with the pinned views and the origin of every column."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.lineage import LineagePicture, draw_lineage, lineage_picture
from falaj.apps.console.components.listing import LISTED, fits, read_all, search_field
from falaj.apps.console.components.sections import Crumb, facts, heading, panel, small_table
from falaj.apps.console.components.states import empty_state
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.lineage import column_row, draw_columns
from falaj.apps.console.times import Times, number
from falaj.errors import NotFound
from falaj.records.features import ColumnOrigin, TrainingSet
from falaj.records.governance.lineage import LineageNode
from falaj.sdk.platform import Platform

COLUMNS = (
    TableColumn("name", "Training set", kind="link", sortable=True),
    TableColumn("rows", "Rows", kind="number", sortable=True),
    TableColumn("columns", "Columns", kind="number", sortable=True),
    TableColumn("span", "Rows of the time"),
    TableColumn("views", "Views", kind="number", sortable=True),
    TableColumn("label", "Restriction"),
    TableColumn("created", "Made", sortable=True),
)
DEPTH = 6


@dataclass(frozen=True)
class TrainingSetRow:
    name: str
    rows: int
    columns: int
    span: str
    views: int
    label: str
    created: str


@dataclass(frozen=True)
class TrainingSetList:
    rows: tuple[TrainingSetRow, ...]
    total: int


@dataclass(frozen=True)
class TrainingSetRecords:
    found: TrainingSet
    columns: Sequence[ColumnOrigin]
    nodes: Sequence[LineageNode]


@dataclass(frozen=True)
class TrainingSetView:
    name: str
    about: tuple[tuple[str, str], ...]
    pins: tuple[tuple[str, str, str, str], ...]
    """The views that were read: name, version, table version, and what counted as known."""
    columns: tuple[tuple[str, str, str, str], ...]
    computed: tuple[tuple[str, str], ...]
    lineage: LineagePicture


def training_set_list(found: Sequence[TrainingSet], *, words: str, times: Times) -> TrainingSetList:
    """Return the training sets that have every word in their name, columns or restriction, newest first."""
    fitting = [each for each in found if fits(words, each.name, *each.columns, each.label.describe())]
    rows = [
        TrainingSetRow(
            name=each.name,
            rows=each.rows,
            columns=len(each.columns),
            span=_span(each, times),
            views=len(each.views),
            label=each.label.describe(),
            created=times.moment(each.created_at),
        )
        for each in sorted(fitting, key=lambda each: each.created_at, reverse=True)
    ]
    return TrainingSetList(tuple(rows), len(found))


def training_set_view(records: TrainingSetRecords, *, times: Times) -> TrainingSetView:
    """Return what the page of one training set shows."""
    found = records.found
    names = {each.view_id: each.view for each in records.columns if each.view_id and each.view}
    names |= {node.id: node.name for node in records.nodes if node.kind == "view"}
    return TrainingSetView(
        name=found.name,
        about=(
            ("rows", number(found.rows)),
            ("columns", number(len(found.columns))),
            ("spine", names.get(found.spine) or found.spine),
            ("event time", found.event_time),
            ("rows of the time", _span(found, times)),
            ("table version", str(found.table_version)),
            ("zone", found.zone),
            ("restriction", found.label.describe()),
            ("made", times.moment(found.created_at)),
            ("id", found.id),
        ),
        pins=tuple(
            (
                names.get(pin.view) or pin.view,
                f"version {pin.version}",
                f"table version {pin.table_version}",
                pin.known_at.value.replace("_", " "),
            )
            for pin in found.views
        ),
        columns=tuple(column_row(each) for each in records.columns),
        computed=tuple((each.name, each.expression) for each in found.request_features),
        lineage=lineage_picture(records.nodes, workspace=found.workspace, times=times),
    )


def _span(found: TrainingSet, times: Times) -> str:
    if found.since is None and found.until is None:
        return "all of its spine"
    begin = "the first row" if found.since is None else times.moment(found.since)
    return f"{begin} to {'the last row' if found.until is None else times.moment(found.until)}"


# ------------------------------------------------------------------------------------------- drawing


def draw_list(context: PageContext, view: TrainingSetList, words: str) -> None:
    if not view.total:
        empty_state(
            "No training set was made here.",
            command="falaj features training-set NAME --spine VIEW --views VIEW,VIEW",
            icon="dataset",
        )
        return
    if not view.rows:
        empty_state(f"No training set has “{words}”. {number(view.total)} are here.", icon="search_off")
        return
    rows = [
        TableRow(
            each.name,
            {name: getattr(each, name) for name in TrainingSetRow.__dataclass_fields__},
            context.href("training-sets", each.name),
        )
        for each in view.rows
    ]
    ui.label(f"{number(len(rows))} of {number(view.total)} training sets").classes("muted small")
    data_table(COLUMNS, rows, title="Training sets")


async def draw_training_sets(context: PageContext) -> None:
    """Draw the list; a set that is made appears at once."""
    here = context.workspace
    chosen = {"words": context.query.get("q", "")}
    heading("Training sets", above=[Crumb("Features", context.href("features"))])

    async def loaded() -> TrainingSetList:
        found = await context.ask(
            lambda p: read_all(
                p, lambda p, at: p.features.training_sets(workspace=here, after=at, limit=LISTED)
            )
        )
        return training_set_list(found, words=chosen["words"], times=context.times)

    async def search(words: str) -> None:
        chosen["words"] = words
        await region.refresh()

    with ui.element("div").classes("toolbar"):
        search_field(context, label="Search names, columns, restrictions", on_search=search)
    region = await context.region(
        loaded, lambda view: draw_list(context, view, chosen["words"]), events=("features.training_set",)
    )


async def load_one(context: PageContext, name: str) -> TrainingSetView:
    """Ask the platform for one training set; `name` is its name or id."""
    reference = f"{context.workspace}/dataset:{name}"
    stored = await context.ask(lambda p: p.objects.show(reference))
    columns, nodes, listed = await asyncio.gather(
        context.ask(lambda p: p.features.column_lineage(stored.id)),
        context.ask(lambda p: [*p.lineage.graph(stored.id, depth=DEPTH)]),
        context.ask(lambda p: _one_of(p, context.workspace, stored.id)),
    )
    return training_set_view(TrainingSetRecords(listed, columns, nodes), times=context.times)


def _one_of(platform: Platform, workspace: str, ident: str) -> TrainingSet:
    """Return a training set of the list: no operation shows one alone."""
    found = read_all(
        platform, lambda p, at: p.features.training_sets(workspace=workspace, after=at, limit=LISTED)
    )
    for each in found:
        if each.id == ident:
            return each
    raise NotFound(f"{ident} is not among the training sets of {workspace}")


def draw_view(context: PageContext, view: TrainingSetView) -> None:
    above = [
        Crumb("Features", context.href("features")),
        Crumb("Training sets", context.href("training-sets")),
    ]
    heading(view.name, above=above, words="training set, pinned: it can be rebuilt to the bit")
    with ui.element("div").classes("stack"):
        with ui.element("div").classes("columns flush"):
            with panel("Facts"):
                facts(view.about, mono=("id",))
            with panel("Pinned views"):
                small_table(("view", "version", "table", "known at"), view.pins, title="Pinned views")
                if view.computed:
                    small_table(
                        ("request feature", "expression"),
                        view.computed,
                        title="Features computed at a request",
                    )
        with panel("Lineage"):
            draw_lineage(
                context, view.lineage, title=f"The lineage of the training set {view.name}", start=view.name
            )
        draw_columns(context, view.columns)


async def draw_training_set(context: PageContext) -> None:
    """Draw one training set; what uses it appears as it is made."""
    name = context.params["training_set"]

    async def loaded() -> TrainingSetView:
        return await load_one(context, name)

    await context.region(
        loaded, lambda view: draw_view(context, view), events=("features.*", "models.register", "jobs.submit")
    )


PAGES = [
    ConsolePage(
        "/w/{workspace}/training-sets",
        "Training sets",
        draw_training_sets,
        entry="features",
        reads=("features.training_sets",),
    ),
    ConsolePage(
        "/w/{workspace}/training-sets/{training_set}",
        "Training set",
        draw_training_set,
        entry="features",
        reads=("objects.show", "features.training_sets", "features.column_lineage", "lineage.graph"),
    ),
]
