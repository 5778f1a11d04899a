"""Artifacts as a page shows them: pictures, the first rows of tables, and texts. Nothing in them is ever run."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from nicegui import ui

from falaj.apps.console.components.states import command_line
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.components.texts import plain_text
from falaj.apps.console.times import size
from falaj.records.tracking import ArtifactTable

PICTURE_BYTES = 4 << 20
TEXT_BYTES = 64 << 10
TABLE_BYTES = 256 << 10
TABLE_ROWS, TABLE_COLUMNS, CELL_CHARACTERS = 50, 30, 200

PICTURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
"""Types of pictures by how their bytes begin; WebP is found by its form."""
TEXTS = (
    *(".txt", ".log", ".md", ".rst", ".py", ".r", ".sh", ".sql", ".js", ".css", ".html", ".htm", ".xml"),
    *(".yaml", ".yml", ".toml", ".ini", ".cfg", ".env", ".lock", ".patch", ".diff"),
)
TABLES = {".csv": "csv", ".tsv": "tsv", ".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl"}
STORED_TABLES = (".parquet", ".pq", ".arrow", ".feather")
"""Tables whose bytes the platform parses, in a process without keys."""

ArtifactKind = Literal["picture", "drawing", "table", "stored table", "text", "other"]


@dataclass(frozen=True)
class ArtifactView:
    """One artifact: what can be shown of it."""

    path: str
    kind: ArtifactKind
    note: str
    """What is left out, or why nothing is shown."""
    picture: str = ""
    """A data address; scripts in it do not run, and it loads nothing: it is shown as an image."""
    text: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def kind_of(path: str) -> ArtifactKind:
    """Return how an artifact is shown, by the end of its name."""
    name = path.lower()
    if name.endswith((".png", ".jpg", ".jpeg", ".gif", ".webp")):
        return "picture"
    if name.endswith(".svg"):
        return "drawing"
    if name.endswith((*TABLES,)):
        return "table"
    if name.endswith(STORED_TABLES):
        return "stored table"
    return "text" if name.endswith((*TEXTS,)) else "other"


def bytes_needed(path: str) -> int:
    """Return how many bytes of an artifact are read to show it."""
    kind = kind_of(path)
    if kind in ("picture", "drawing"):
        return PICTURE_BYTES
    return {"table": TABLE_BYTES, "text": TEXT_BYTES}.get(kind, 0)


def artifact_view(path: str, data: bytes, size_bytes: int) -> ArtifactView:
    """Return what is shown of an artifact, whose first bytes are `data`."""
    kind = kind_of(path)
    if kind in ("picture", "drawing") and size_bytes > PICTURE_BYTES:
        return ArtifactView(path, "other", f"Pictures of more than {size(PICTURE_BYTES)} are not shown.")
    if kind == "picture":
        media = picture_type(data)
        if media is None:
            return ArtifactView(path, "other", "Its bytes are not a PNG, JPEG, GIF or WebP picture.")
        return ArtifactView(path, kind, size(size_bytes), picture=_data_address(media, data))
    if kind == "drawing":
        return ArtifactView(path, kind, size(size_bytes), picture=_data_address("image/svg+xml", data))
    text = data.decode("utf-8", errors="replace").replace("\x00", "�")
    cut = len(data) < size_bytes
    if kind == "table" and (rows := _rows(path, text, cut=cut)) is not None:
        return _table(path, rows[0], rows[1], cut=cut)
    if kind in ("table", "text"):
        shown = text[:TEXT_BYTES]
        note = f"The first {size(len(shown))} of {size(size_bytes)}." if len(shown) < size_bytes else ""
        return ArtifactView(path, "text", note, text=shown)
    return ArtifactView(path, "other", "This kind of file is not shown.")


def stored_table_view(path: str, found: ArtifactTable) -> ArtifactView:
    """Return the first rows of a table that the platform has parsed."""
    rows = tuple(tuple(_cell(each) for each in row[:TABLE_COLUMNS]) for row in found.rows)
    note = _table_note(len(rows), found.total_rows, len(found.columns))
    return ArtifactView(path, "stored table", note, columns=found.columns[:TABLE_COLUMNS], rows=rows)


def picture_type(data: bytes) -> str | None:
    """Return the type of a picture by its first bytes, whatever its name says."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((media for begin, media in PICTURES.items() if data.startswith(begin)), None)


def _data_address(media: str, data: bytes) -> str:
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def _rows(path: str, text: str, *, cut: bool) -> tuple[list[str], list[list[Any]]] | None:
    """Return columns and rows of a table; none if it is no table. The last line of a text that was cut is left out."""
    form = next(form for end, form in TABLES.items() if path.lower().endswith(end))
    lines = text.splitlines()[:-1] if cut and form != "json" else text.splitlines()
    if form in ("csv", "tsv"):
        try:
            read = csv.reader(io.StringIO("\n".join(lines)), delimiter="\t" if form == "tsv" else ",")
            found = [*islice(read, TABLE_ROWS + 1)]
        except csv.Error:
            return None
        return (found[0], [*found[1:]]) if found else None
    try:
        values = [json.loads(line) for line in lines if line.strip()] if form == "jsonl" else json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _records(values)


def _records(values: Any) -> tuple[list[str], list[list[Any]]] | None:
    """Return a list of objects, or an object of equally long lists, as a table."""
    if isinstance(values, dict) and {"columns", "data"} <= values.keys():
        names, rows = values["columns"], values["data"]
        is_table = (
            isinstance(names, list) and isinstance(rows, list) and all(isinstance(r, list) for r in rows)
        )
        return ([str(name) for name in names], rows) if is_table else None
    if isinstance(values, dict) and values and all(isinstance(each, list) for each in values.values()):
        longest = max(len(each) for each in values.values())
        columns = [[*each, *[None] * (longest - len(each))] for each in values.values()]
        return [str(name) for name in values], [[*row] for row in islice(zip(*columns, strict=True), longest)]
    if isinstance(values, list) and values and all(isinstance(each, dict) for each in values):
        names = [*dict.fromkeys(str(name) for each in values[:TABLE_ROWS] for name in each)]
        return names, [[each.get(name) for name in names] for each in values]
    return None


def _table(path: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, cut: bool) -> ArtifactView:
    names = tuple(_cell(name) for name in columns[:TABLE_COLUMNS])
    shown = tuple(
        tuple(_cell(row[at]) if at < len(row) else "" for at in range(len(names)))
        for row in rows[:TABLE_ROWS]
    )
    total = None if cut or len(rows) >= TABLE_ROWS else len(rows)
    note = _table_note(len(shown), total, len(columns))
    return ArtifactView(path, "table", note, columns=names, rows=shown)


def _table_note(rows: int, total: int | None, columns: int) -> str:
    note = f"{rows} rows" if total == rows else f"The first {rows} rows"
    note += f" of {total:,}" if total is not None and total != rows else ""
    return note + (f", {TABLE_COLUMNS} of {columns} columns" if columns > TABLE_COLUMNS else "")


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    return text if len(text) <= CELL_CHARACTERS else text[:CELL_CHARACTERS] + "…"


# ------------------------------------------------------------------------------------------- drawing


def draw_artifact(view: ArtifactView, run: str) -> None:
    """Draw an artifact."""
    with ui.element("section").classes("panel").style("margin-top: 12px").props("data-part=artifact"):
        ui.label(view.path).classes("panel-title wrap").props("role=heading aria-level=3")
        if view.picture:
            shown = ui.element("img").style("max-width: 100%; max-height: 480px; background: #fff")
            shown.props["src"], shown.props["alt"] = view.picture, view.path
        elif view.columns:
            columns = [TableColumn(f"c{at}", name) for at, name in enumerate(view.columns)]
            rows = [
                TableRow(str(number), {f"c{at}": value for at, value in enumerate(row)})
                for number, row in enumerate(view.rows)
            ]
            data_table(columns, rows, title=f"First rows of {view.path}")
        elif view.text:
            plain_text(view.text, height_px=420)
        if view.note:
            ui.label(view.note).classes("muted small")
        command_line(f"falaj runs read-artifact {run} {quoted(view.path)} > FILE")


def quoted(path: str) -> str:
    """Return a path as a word of a command line."""
    plain = (
        path.replace("/", "").replace(".", "").replace("-", "").replace("_", "").isalnum() and path.isascii()
    )
    return path if plain else "'" + path.replace("'", "'\\''") + "'"
