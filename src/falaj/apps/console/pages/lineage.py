"""The lineage of any object: what it was made from, and what was made from it, as a graph and as a tree."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.lineage import LineagePicture, draw_lineage, draw_side, lineage_picture
from falaj.apps.console.components.sections import Cell, facts, heading, panel, small_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.times import Times, number
from falaj.errors import Denied, NotFound
from falaj.records.features import ColumnOrigin
from falaj.records.governance.lineage import Direction, LineageNode
from falaj.records.governance.objects import StoredObject
from falaj.records.serving.predictions import PredictionRecord

ONE_PREDICTION = re.compile(r"(?P<batch>[a-z]+_[0-9a-z]{26})-[0-9]+(\.[0-9]+)?")
"""A row of a batch of predictions; its lineage is that of the batch."""
DIRECTIONS = (("both", "Both"), ("up", "Made from"), ("down", "Used by"))
DEPTHS = (4, 8, 16, 40)
"""Steps; an operation is one, so that two of them lead from an object to the next."""
EVENTS = (
    "features.*",
    "jobs.*",
    "runs.*",
    "models.*",
    "endpoints.*",
    "predictions.*",
    "blobs.*",
    "objects.*",
)


@dataclass(frozen=True)
class LineageRecords:
    """What the page is made from; `prediction` and `columns` where the object has them and the person may see them."""

    object: StoredObject
    nodes: Sequence[LineageNode]
    columns: Sequence[ColumnOrigin] = ()
    prediction: PredictionRecord | None = None


@dataclass(frozen=True)
class LineageView:
    title: str
    kind: str
    about: tuple[tuple[str, str], ...]
    picture: LineagePicture
    columns: tuple[tuple[str, str, str, str], ...]
    """Columns of a training set: name, view, version and column of it, or the expression."""
    prediction: tuple[tuple[str, str], ...]


def lineage_view(records: LineageRecords, *, times: Times) -> LineageView:
    """Return what the page shows."""
    found = records.object
    return LineageView(
        title=found.name or found.id,
        kind=found.kind,
        about=(
            ("id", found.id),
            ("zone", found.zone or "–"),
            ("restriction", found.label.describe()),
            ("created", times.moment(found.created_at)),
        ),
        picture=lineage_picture(records.nodes, workspace=found.workspace, times=times),
        columns=tuple(column_row(each) for each in records.columns),
        prediction=() if records.prediction is None else _prediction(records.prediction, times),
    )


def column_row(origin: ColumnOrigin) -> tuple[str, str, str, str]:
    """Return a column, the view that it comes from, its version, and the column there or the expression."""
    if origin.view_id is not None:
        version = "" if origin.view_version is None else f"version {origin.view_version}"
        return origin.column, origin.view or "a view that you may not see", version, origin.field or ""
    return origin.column, "", "", origin.expression or "from the spine"


def _prediction(found: PredictionRecord, times: Times) -> tuple[tuple[str, str], ...]:
    answered = (("true value", number(found.label)),) if found.label is not None else ()
    return (
        ("prediction", found.id),
        ("endpoint", found.endpoint),
        ("version", f"{found.model}@{found.version}"),
        ("caller", found.caller),
        ("time", times.moment(found.at)),
        ("inputs", json.dumps(found.inputs, ensure_ascii=False)[:2000]),
        ("outputs", json.dumps(found.outputs, ensure_ascii=False)[:2000]),
        *answered,
    )


# ------------------------------------------------------------------------------------------- drawing


async def load(context: PageContext, asked: str, direction: Direction, depth: int) -> LineageView:
    """Ask the platform, and return what the page shows."""
    one = ONE_PREDICTION.fullmatch(asked)
    ident = one["batch"] if one else asked
    found = await context.ask(lambda p: p.objects.show(ident))
    nodes = await context.ask(lambda p: [*p.lineage.graph(found.id, direction=direction, depth=depth)])
    columns: Sequence[ColumnOrigin] = ()
    prediction = None
    if found.kind == "dataset":
        columns = await context.ask(lambda p: p.features.column_lineage(found.id))
    if one:
        try:
            prediction = await context.ask(lambda p: p.endpoints.prediction(asked))
        except (Denied, NotFound):
            prediction = None
    records = LineageRecords(found, nodes, columns, prediction)
    return lineage_view(records, times=context.times)


def draw_view(context: PageContext, view: LineageView, asked: str) -> None:
    heading(view.title, words=f"{view.kind.replace('_', ' ')} · lineage")
    with ui.element("div").classes("stack"):
        if view.prediction:
            with panel("This prediction"):
                facts(view.prediction, mono=("prediction", "inputs", "outputs"))
        with panel("Graph", note="A click on a node opens its page; drag and scroll to move and zoom."):
            _choices(context)
            draw_lineage(context, view.picture, title=f"The lineage of {view.title}", start=asked)
        with ui.element("div").classes("columns flush"):
            _side(context, "Made from", view, up=True)
            _side(context, "Used by", view, up=False)
        if view.columns:
            draw_columns(context, view.columns)
        with panel("Object"):
            facts(view.about, mono=("id",))


def draw_columns(context: PageContext, columns: Sequence[tuple[str, str, str, str]]) -> None:
    """Draw where the columns of a training set come from."""
    rows = [
        (name, Cell(view, context.href("features", view) if view and " " not in view else ""), version, field)
        for name, view, version, field in columns
    ]
    with panel("Columns"):
        small_table(("column", "view", "version", "comes from"), rows, title="Columns and their origins")


def _side(context: PageContext, title: str, view: LineageView, *, up: bool) -> None:
    items = view.picture.upstream if up else view.picture.downstream
    with panel(title):
        draw_side(context, items)


def _choices(context: PageContext) -> None:
    """Draw the links that choose direction and depth."""
    asked = context.params["object"]
    direction, depth = _asked(context)
    with ui.element("div").classes("toolbar").props("role=group aria-label='What the graph shows'"):
        for key, label in DIRECTIONS:
            target = context.href("lineage", asked, direction=key, depth=str(depth))
            link = ui.link(label, target).classes("choice")
            if key == direction.value:
                link.classes("here").props("aria-current=true")
        ui.label("steps").classes("muted small")
        for each in DEPTHS:
            target = context.href("lineage", asked, direction=direction.value, depth=str(each))
            link = ui.link(str(each // 2), target).classes("choice")
            if each == depth:
                link.classes("here").props("aria-current=true")


def _asked(context: PageContext) -> tuple[Direction, int]:
    direction = context.query.get("direction", "both")
    depth = context.query.get("depth", "")
    return (
        Direction(direction) if direction in [each.value for each in Direction] else Direction.BOTH,
        int(depth) if depth.isdecimal() and int(depth) in DEPTHS else DEPTHS[1],
    )


async def draw(context: PageContext) -> None:
    """Draw the page; what is made from the object appears as it is made."""
    asked = context.params["object"]
    direction, depth = _asked(context)

    async def loaded() -> LineageView:
        return await load(context, asked, direction, depth)

    await context.region(loaded, lambda view: draw_view(context, view, asked), events=EVENTS)


PAGE = ConsolePage(
    "/w/{workspace}/lineage/{object}",
    "Lineage",
    draw,
    entry="governance",
    reads=("objects.show", "lineage.graph", "features.column_lineage", "endpoints.prediction"),
)
