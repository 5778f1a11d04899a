"""Records as tables and lists of fields: styled on a terminal, aligned text elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from falaj.apps.cli.output.values import format_value, printable

COLUMNS: dict[str, tuple[str, ...]] = {
    "Alert": ("id", "state", "version", "columns", "since", "until", "rows", "windows"),
    "AllowedPrincipal": ("principal", "kind", "rule"),
    "AuditEntry": ("seq", "at", "caller", "action", "outcome", "rule", "objects"),
    "Blob": ("name", "size_bytes", "zone", "label", "created_at", "committed", "id"),
    "Group": ("name", "members", "id"),
    "Job": ("id", "name", "state", "attempt", "progress", "submitted_at", "ended_at", "reason"),
    "LineageNode": ("depth", "kind", "name", "zone", "label", "id"),
    "Monitor": ("name", "endpoint", "training_set", "reference_rows", "alert", "created_at", "id"),
    "Optimization": ("id", "model", "data", "target", "job", "created_at"),
    "Policy": ("name", "workspace", "version", "published_at", "id"),
    "Principal": ("name", "kind", "disabled", "created_at", "id"),
    "Secret": ("name", "set_by", "changed_at", "created_at", "id"),
    "StoredObject": ("name", "kind", "zone", "label", "created_at", "id"),
    "Token": ("id", "principal", "purpose", "workspace", "actions", "expires_at", "revoked_at"),
    "TrainingSet": ("name", "rows", "event_time", "zone", "label", "created_at", "id"),
    "WorkflowRun": ("id", "workflow", "state", "step", "steps", "doing", "created_at"),
    "Workspace": ("name", "created_at", "id"),
}
"""The fields that a table shows, the most useful first; a type that is not here shows them all."""

GAP = 2


def on_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def show_table(records: Sequence[BaseModel]) -> None:
    """One row per record."""
    kind = type(records[0])
    fields = COLUMNS.get(kind.__name__) or tuple(kind.model_fields)
    rows = [[format_value(getattr(record, field), field) for field in fields] for record in records]
    show_rows([heading(field) for field in fields], rows)


def show_rows(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """`rows` under `headings`; a terminal that is too narrow is spared the last columns."""
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
    """Names and values, one pair a line."""
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
    return field.removesuffix("_bytes").removesuffix("_at").replace("_", " ")


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """`rows` as lines whose columns begin below each other."""
    wide = widths(rows)
    gap = " " * GAP
    return [gap.join(f"{cell:<{w}}" for cell, w in zip(row, wide, strict=True)).rstrip() for row in rows]


def widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def count_fitting(wide: Sequence[int], room: int) -> int:
    """How many of the first columns fit into `room`; two at least."""
    total, count = -GAP, 0
    for width in wide:
        total += width + GAP
        if total > room and count >= 2:
            break
        count += 1
    return count


def show_text(text: str) -> None:
    """Text of several lines, as it is, but for what could steer a terminal."""
    print(printable(text.rstrip("\n")))


def _print(table: object) -> None:
    from rich.console import Console

    Console(highlight=False, markup=False).print(table)
