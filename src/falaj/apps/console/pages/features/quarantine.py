"""Rows of a feature view that were set aside at ingestion: the files, the rules that they break, and rows of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.actions import action_button
from falaj.apps.console.components.sections import Cell, facts, panel, small_table
from falaj.apps.console.components.states import empty_state
from falaj.apps.console.page import PageContext
from falaj.apps.console.times import Times, number
from falaj.errors import Denied, NotFound
from falaj.records.features import QuarantinedBatch, QuarantinedRows

SHOWN_BATCHES, SHOWN_ROWS = 50, 20


@dataclass(frozen=True)
class BatchLine:
    """A quarantined batch in the table."""

    name: str
    rows: str
    rules: str
    at: str
    by: str
    became: str


@dataclass(frozen=True)
class OpenedBatch:
    """The first rows of a batch; `columns` are none if the person may not read them."""

    id: str
    name: str
    about: tuple[tuple[str, str], ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str
    may: frozenset[str]


@dataclass(frozen=True)
class QuarantineView:
    """The newest quarantined batches of a view, and the one that is opened, if any has rows left."""

    batches: tuple[BatchLine, ...]
    opened: OpenedBatch | None


def quarantine_view(
    batches: Sequence[QuarantinedBatch],
    opened: QuarantinedBatch | None,
    rows: QuarantinedRows | None,
    may: frozenset[str],
    *,
    times: Times,
) -> QuarantineView:
    """Return what the tab shows."""
    shown = None if opened is None else _opened(opened, rows, may, times)
    return QuarantineView(tuple(_line(each, times) for each in batches), shown)


def chosen_batch(batches: Sequence[QuarantinedBatch], asked: str) -> QuarantinedBatch | None:
    """Return the batch that is asked for by name, if it has rows; else the newest that has."""
    filled = [each for each in batches if each.rows]
    return next((each for each in filled if each.name == asked), next(iter(filled), None))


def _line(batch: QuarantinedBatch, times: Times) -> BatchLine:
    became = [
        f"{number(count)} {word}"
        for count, word in ((batch.ingested, "ingested"), (batch.discarded, "discarded"))
        if count
    ]
    rules = ", ".join(f"{each.column} {each.rule} ({number(each.rows)})" for each in batch.rules)
    return BatchLine(
        batch.name, number(batch.rows), rules, times.moment(batch.at), batch.by, ", ".join(became)
    )


def _opened(
    batch: QuarantinedBatch, rows: QuarantinedRows | None, may: frozenset[str], times: Times
) -> OpenedBatch:
    found = () if rows is None else rows.items
    shown = tuple(
        (
            str(each.row),
            ", ".join(f"{one.column} {one.rule}" for one in each.broken),
            *("—" if value is None else value for value in each.values),
        )
        for each in found
    )
    return OpenedBatch(
        id=batch.id,
        name=batch.name,
        about=(
            ("file", batch.file or "not visible to you"),
            ("added", f"{times.moment(batch.at)} by {batch.by}, to version {batch.version}"),
            ("rows left", f"{number(batch.rows)} of {number(batch.quarantined)}"),
        ),
        columns=() if rows is None else ("row", "breaks", *rows.columns),
        rows=shown,
        note=f"The first {number(len(shown))} of {number(batch.rows)} rows, as they came.",
        may=may,
    )


async def load_quarantine(context: PageContext, view: str) -> QuarantineView:
    """Ask the platform, and return what the tab shows."""
    page = await context.ask(lambda p: p.features.quarantined_batches(view, limit=SHOWN_BATCHES))
    opened = chosen_batch(page.items, context.query.get("batch", ""))
    if opened is None:
        return quarantine_view(page.items, None, None, frozenset(), times=context.times)
    batch = opened.id
    try:
        rows = await context.ask(lambda p: p.features.quarantined_rows(batch, limit=SHOWN_ROWS))
    except (Denied, NotFound):
        rows = None
    may = await context.may(batch)
    return quarantine_view(page.items, opened, rows, may, times=context.times)


def draw_quarantine(context: PageContext, view: QuarantineView, name: str) -> None:
    """Draw the tab: the batches, and the first rows of the one that is opened."""
    with ui.element("div").classes("stack"):
        with panel(
            "Files with invalid rows", note="Newest first. Rows of these files that break no rule were added."
        ):
            if not view.batches:
                empty_state("No row is quarantined.", icon="verified")
            else:
                heads = ("batch", "rows left", "rules they break", "time", "by", "since then")
                lines = [
                    (
                        Cell(each.name, context.href("features", name, tab="quarantine", batch=each.name)),
                        *(each.rows, each.rules, each.at, each.by, each.became),
                    )
                    for each in view.batches
                ]
                small_table(heads, lines, title="Quarantined batches")
        if view.opened is not None:
            _draw_rows(context, view.opened)


def _draw_rows(context: PageContext, batch: OpenedBatch) -> None:
    with panel(batch.name):
        facts(batch.about)
        with ui.element("div").classes("toolbar"):
            action_button(
                context,
                "Ingest again",
                "features.ingest_quarantined",
                lambda p: p.features.ingest_quarantined(batch.id),
                may=batch.may,
                done=lambda made: f"{made.added} rows were added; {made.quarantined} are left.",
                confirm=f"Check the rows of {batch.name} by the rules of the view as they are now, and add those that "
                "break none?",
            )
            action_button(
                context,
                "Discard",
                "features.discard_quarantined",
                lambda p: p.features.discard_quarantined(batch.id),
                may=batch.may,
                done=lambda made: f"{made.discarded} rows were discarded.",
                confirm=f"Delete the rows of {batch.name}? They cannot be brought back.",
            )
        if batch.columns:
            ui.label(batch.note).classes("muted small")
            small_table(batch.columns, batch.rows, title=f"Rows of {batch.name}")
        else:
            ui.label("Who may read the rows of the view sees them here.").classes("muted")
