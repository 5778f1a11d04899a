"""The catalogue of feature views, with search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.listing import LISTED, fits, read_all, search_field
from falaj.apps.console.components.sections import heading
from falaj.apps.console.components.states import empty_state
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.times import Times, duration, number
from falaj.records.features import StoredView

COLUMNS = (
    TableColumn("name", "View", kind="link", sortable=True),
    TableColumn("entities", "Entities", sortable=True),
    TableColumn("features", "Features"),
    TableColumn("rows", "Rows", kind="number", sortable=True),
    TableColumn("version", "Version", kind="number", sortable=True),
    TableColumn("online", "Online", sortable=True),
    TableColumn("ttl", "Time to live"),
    TableColumn("label", "Restriction"),
    TableColumn("created", "Since", "time", sortable=True),
)
SHOWN_FEATURES = 6


@dataclass(frozen=True)
class CatalogueRow:
    name: str
    entities: str
    features: str
    rows: int
    version: int
    online: str
    ttl: str
    label: str
    created: str


@dataclass(frozen=True)
class FeatureCatalogue:
    rows: tuple[CatalogueRow, ...]
    total: int


def catalogue(views: Sequence[StoredView], *, words: str, times: Times) -> FeatureCatalogue:
    """Return the views that have every word in their name, entities, columns or restriction."""
    rows = [_row(each, times) for each in views if _fits(each, words)]
    return FeatureCatalogue(tuple(sorted(rows, key=lambda row: row.name)), len(views))


def _fits(view: StoredView, words: str) -> bool:
    given = view.definition
    columns = [feature.name for feature in (*given.features, *given.columns)]
    return fits(words, given.name, *given.entities, *columns, view.label.describe(), view.zone)


def _row(view: StoredView, times: Times) -> CatalogueRow:
    names = [feature.name for feature in view.definition.features]
    more = f" and {len(names) - SHOWN_FEATURES} more" if len(names) > SHOWN_FEATURES else ""
    return CatalogueRow(
        name=view.definition.name,
        entities=", ".join(view.definition.entities),
        features=", ".join(names[:SHOWN_FEATURES]) + more,
        rows=view.rows,
        version=view.version,
        online=online_state(view),
        ttl=duration(view.definition.ttl) if view.definition.ttl else "none",
        label=view.label.describe(),
        created=times.day(view.created_at),
    )


def online_state(view: StoredView) -> str:
    """Say whether the online store has the newest rows of a view."""
    if view.online_version is None:
        return "no"
    return "yes" if view.online_version == view.table_version else "behind"


# ------------------------------------------------------------------------------------------- drawing


def draw_catalogue(context: PageContext, view: FeatureCatalogue, words: str) -> None:
    if not view.total:
        empty_state("No feature view is defined here.", command="falaj apply features.py", icon="table_chart")
        return
    if not view.rows:
        empty_state(f"No feature view has “{words}”. {number(view.total)} are here.", icon="search_off")
        return
    rows = [
        TableRow(
            each.name,
            {name: getattr(each, name) for name in CatalogueRow.__dataclass_fields__},
            context.href("features", each.name),
        )
        for each in view.rows
    ]
    ui.label(f"{number(len(rows))} of {number(view.total)} views").classes("muted small")
    data_table(COLUMNS, rows, title="Feature views")


async def draw(context: PageContext) -> None:
    """Draw the page; a view that is applied appears at once."""
    here = context.workspace
    chosen = {"words": context.query.get("q", "")}
    heading("Features")

    async def loaded() -> FeatureCatalogue:
        views = await context.ask(
            lambda p: read_all(p, lambda p, at: p.features.list(workspace=here, after=at, limit=LISTED))
        )
        return catalogue(views, words=chosen["words"], times=context.times)

    async def search(words: str) -> None:
        chosen["words"] = words
        await region.refresh()

    with ui.element("div").classes("toolbar"):
        search_field(context, label="Search names, entities, columns, restrictions", on_search=search)
        ui.link("Training sets", context.href("training-sets")).classes("choice")
    region = await context.region(
        loaded, lambda view: draw_catalogue(context, view, chosen["words"]), events=("features.*",)
    )


PAGE = ConsolePage("/w/{workspace}/features", "Features", draw, entry="features", reads=("features.list",))
