"""Tables of records: sorted and paged by the API, or in the browser where all rows are there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nicegui import events, ui

from falaj.apps.console.components.states import SIGNS, TONES

Cell = str | float | int | None


@dataclass(frozen=True)
class TableColumn:
    """A column. `key` is where rows have its value; it is the table's own word, never a name that people chose.

    A `link` leads where `TableRow.target` says; a `state` has a sign and a colour; a `time` stays on one line.
    """

    key: str
    label: str
    kind: Literal["text", "number", "link", "state", "mono", "time"] = "text"
    sortable: bool = False


@dataclass(frozen=True)
class TableRow:
    """A row: its values by column, and where its link leads. `key` tells rows apart."""

    key: str
    cells: Mapping[str, Cell] = field(hash=False)
    target: str = ""


@dataclass(frozen=True)
class Sorting:
    """By which column a table is sorted."""

    key: str
    descending: bool = False


# Templates of the framework: they are constant, and show every value as text.
LINK = '<q-td :props="props"><a class="cell-link" :href="props.row.target">{{ props.value }}</a></q-td>'
SORTABLE = """
<q-th :props="props" tabindex="0" @keydown.enter.prevent="props.sort(props.col)"
  @keydown.space.prevent="props.sort(props.col)">{{ props.col.label }}</q-th>
"""
"""The head of a column by which rows are sorted; also with the keyboard."""
NUMBER = (
    '<q-td :props="props">'
    "{{ typeof props.value === 'number' ? props.value.toLocaleString('en-US') : props.value }}</q-td>"
)
STATE = (
    '<q-td :props="props"><span :class="\'badge \' + props.row.tones[props.col.name]">'
    '<q-icon :name="props.row.signs[props.col.name]" aria-hidden="true"></q-icon>{{ props.value }}</span></q-td>'
)
TEMPLATES = {"link": LINK, "number": NUMBER, "state": STATE}
CLASSES = {"number": "mono wrap", "mono": "mono wrap", "time": "mono time"}


def data_table(
    columns: Sequence[TableColumn],
    rows: Sequence[TableRow],
    *,
    title: str,
    sorting: Sorting | None = None,
    on_sort: Callable[[Sorting], Awaitable[None]] | None = None,
    on_select: Callable[[list[str]], None] | None = None,
) -> ui.table:
    """Draw a table; `title` names it for people who do not see it.

    With `on_sort` the API sorts: it is called with what the person chose, and the caller replaces the rows. Without,
    the browser sorts the rows that are there. With `on_select` rows can be selected; it gets their keys.
    """
    table = ui.table(
        columns=[_column(each) for each in columns],
        rows=[_row(columns, each) for each in rows],
        row_key="key",
        pagination={"rowsPerPage": 0} | _sorted(sorting, len(rows) if on_sort else None),
        selection="multiple" if on_select else None,
        on_select=None
        if on_select is None
        else lambda event: on_select([each["key"] for each in event.selection]),
    )
    table.props("flat bordered hide-pagination wrap-cells binary-state-sort dense").classes("data-table full")
    table.props["aria-label"] = title
    for column in columns:
        if column.kind in TEMPLATES:
            table.add_slot(f"body-cell-{column.key}", TEMPLATES[column.kind])
        if column.sortable:
            table.add_slot(f"header-cell-{column.key}", SORTABLE)
    if on_sort is not None:

        async def sort(event: events.GenericEventArguments) -> None:
            chosen = event.args["pagination"]
            key = str(chosen.get("sortBy") or "")
            if any(column.key == key and column.sortable for column in columns):
                await on_sort(Sorting(key, bool(chosen.get("descending"))))

        table.on("request", sort)
    return table


def replace_rows(
    table: ui.table, columns: Sequence[TableColumn], rows: Sequence[TableRow], sorting: Sorting | None
) -> None:
    """Show other rows in a table that is drawn already."""
    table.pagination = {"rowsPerPage": 0} | _sorted(sorting, len(rows))
    table.rows = [_row(columns, each) for each in rows]


def _sorted(sorting: Sorting | None, count: int | None) -> dict[str, Any]:
    """Return the part of the pagination that says how rows are sorted; with `count` the API has sorted them."""
    counted = {} if count is None else {"rowsNumber": count}
    return counted if sorting is None else counted | {"sortBy": sorting.key, "descending": sorting.descending}


def _column(column: TableColumn) -> dict[str, Any]:
    return {
        "name": column.key,
        "label": column.label,
        "field": column.key,
        "sortable": column.sortable,
        "align": "right" if column.kind == "number" else "left",
        "classes": CLASSES.get(column.kind, "wrap"),
    }


def _row(columns: Sequence[TableColumn], row: TableRow) -> dict[str, Any]:
    states = {
        each.key: TONES.get(str(row.cells.get(each.key)), "idle") for each in columns if each.kind == "state"
    }
    signs = {key: SIGNS[tone] for key, tone in states.items()}
    return {**row.cells, "key": row.key, "target": row.target, "tones": states, "signs": signs}
