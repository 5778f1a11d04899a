"""The models of a workspace, with search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.listing import LISTED, fits, read_all, search_field
from falaj.apps.console.components.sections import heading
from falaj.apps.console.components.states import empty_state
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.times import Times, number
from falaj.records.registry import Model

COLUMNS = (
    TableColumn("name", "Model", kind="link", sortable=True),
    TableColumn("versions", "Versions", kind="number", sortable=True),
    TableColumn("aliases", "Aliases"),
    TableColumn("protected", "Protected"),
    TableColumn("changed", "Last alias moved", sortable=True),
    TableColumn("created", "Since", "time", sortable=True),
)


@dataclass(frozen=True)
class ModelRow:
    name: str
    versions: int
    aliases: str
    protected: str
    changed: str
    created: str


@dataclass(frozen=True)
class ModelList:
    rows: tuple[ModelRow, ...]
    total: int


def model_list(models: Sequence[Model], *, words: str, times: Times) -> ModelList:
    """Return the models that have every word in their name or aliases, by name."""
    fitting = [each for each in models if fits(words, each.name, *(alias.alias for alias in each.aliases))]
    rows = [_row(each, times) for each in fitting]
    return ModelList(tuple(sorted(rows, key=lambda row: row.name)), len(models))


def _row(model: Model, times: Times) -> ModelRow:
    pointing = [each for each in model.aliases if each.version is not None]
    moved = [each.since for each in pointing if each.since is not None]
    return ModelRow(
        name=model.name,
        versions=model.versions,
        aliases=", ".join(f"{each.alias} → {number_of(each.version)}" for each in pointing) or "none",
        protected=", ".join(each.alias for each in model.aliases if each.protected) or "none",
        changed=times.moment(max(moved, default=None)),
        created=times.day(model.created_at),
    )


def number_of(reference: str | None) -> str:
    """Return the number in a reference like churn@14."""
    return "" if reference is None else reference.rpartition("@")[2]


# ------------------------------------------------------------------------------------------- drawing


def draw_list(context: PageContext, view: ModelList, words: str) -> None:
    if not view.total:
        empty_state(
            "No model is registered here.",
            command="falaj models register NAME --file model.onnx",
            icon="category",
        )
        return
    if not view.rows:
        empty_state(f"No model has “{words}”. {number(view.total)} are here.", icon="search_off")
        return
    rows = [
        TableRow(
            each.name,
            {name: getattr(each, name) for name in ModelRow.__dataclass_fields__},
            context.href("models", each.name),
        )
        for each in view.rows
    ]
    ui.label(f"{number(len(rows))} of {number(view.total)} models").classes("muted small")
    data_table(COLUMNS, rows, title="Models")


async def draw(context: PageContext) -> None:
    """Draw the page; a version that is registered appears at once."""
    here = context.workspace
    chosen = {"words": context.query.get("q", "")}
    heading("Models")

    async def loaded() -> ModelList:
        found = await context.ask(
            lambda p: read_all(p, lambda p, at: p.models.list(workspace=here, after=at, limit=LISTED))
        )
        return model_list(found, words=chosen["words"], times=context.times)

    async def search(words: str) -> None:
        chosen["words"] = words
        await region.refresh()

    with ui.element("div").classes("toolbar"):
        search_field(context, label="Search models and aliases", on_search=search)
    region = await context.region(
        loaded, lambda view: draw_list(context, view, chosen["words"]), events=("models.*",)
    )


PAGE = ConsolePage("/w/{workspace}/models", "Models", draw, entry="models", reads=("models.list",))
