"""Tables and lists of fields: styled on a terminal, aligned text elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from falaj.apps.cli.output.values import format_value, printable

Columns = Mapping[type[BaseModel], tuple[str, ...]]
"""The fields that a table of a record shows; a record that is not in it shows all of them."""

GAP = 2


def on_terminal() -> bool:
    """Return whether standard output is a terminal that can be styled."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def show_table(records: Sequence[BaseModel], columns: Columns | None = None) -> None:
    """Print one row for each record."""
    kind = type(records[0])
    fields = (columns or {}).get(kind) or tuple(kind.model_fields)
    rows = [[format_value(getattr(record, field), field) for field in fields] for record in records]
    show_rows([heading(field) for field in fields], rows)


def show_rows(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print `rows` under `headings`; a terminal that is too narrow does not get the last columns."""
    if not on_terminal():
        for line in align([headings, *rows]):
            print(line)
        return
    from rich.table import Table
    from rich.text import Text

    count = count_fitting(widths([headings, *rows]), shutil.get_terminal_size().columns)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for name in headings[:count]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row[:count]))
    _print(table)


def show_fields(fields: Mapping[str, str]) -> None:
    """Print names and values, one pair a line."""
    if not on_terminal():
        for line in align([(name, value) for name, value in fields.items()]):
            print(line)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, GAP, 0, 0))
    table.add_column(style="cyan")
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(name, Text(value))
    _print(table)


def heading(field: str) -> str:
    """Return the heading of a column that shows `field`."""
    return field.removesuffix("_bytes").removesuffix("_at").replace("_", " ")


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return `rows` as lines with aligned columns."""
    wide = widths(rows)
    gap = " " * GAP
    return [gap.join(f"{cell:<{w}}" for cell, w in zip(row, wide, strict=True)).rstrip() for row in rows]


def widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of each column."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def count_fitting(wide: Sequence[int], available: int) -> int:
    """Return how many of the first columns fit into `available` characters; two at least."""
    total, count = -GAP, 0
    for width in wide:
        total += width + GAP
        if total > available and count >= 2:
            break
        count += 1
    return count


def show_text(text: str) -> None:
    """Print text of several lines, with control characters escaped."""
    print(printable(text.rstrip("\n")))


def _print(table: object) -> None:
    from rich.console import Console

    Console(highlight=False, markup=False).print(table)
