"""Read the rows of uploaded blobs, if the caller may, through the parser process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import Row, select

from falaj.errors import Internal, TooLarge, shorten
from falaj.features.backends import FeatureBackends
from falaj.features.definitions import FileColumn
from falaj.governance.operations.call import Call
from falaj.governance.tables import blobs
from falaj.ports.machine.memory import MemoryLease
from falaj.ports.metadata import Transaction
from falaj.ports.parsers import ByteSource
from falaj.ports.queries import ArrowTable
from falaj.records.features import ColumnType, Feature, StoredView
from falaj.records.governance.objects import StoredObject

MAX_SOURCE_BYTES = 2 << 30
"""A source is read into memory as a whole; larger data must be uploaded in parts."""
MAX_ROWS_BYTES = 1 << 30
"""Largest size of the decoded rows of one source; less where the budget is small."""

NOTE_CHARS, MAX_NOTES = 300, 50

ROWS, VIEW_ROWS, COLUMNS = "rows", "view_rows", "columns"
"""The names of the parsers, see assembly/parsing.py."""


class ViewRows(NamedTuple):
    """Rows as a view stores them, and what was assumed to read them so."""

    rows: ArrowTable
    notes: tuple[str, ...]


def spine_rows(
    backends: FeatureBackends, call: Call, blob: StoredObject, *, texts: frozenset[str], memory: MemoryLease
) -> ArrowTable:
    """Return the rows of a blob that the caller may read. CSV columns in `texts` are parsed as text."""
    return _parse(backends, call, blob, ROWS, {"texts": sorted(texts)}, memory)[0]


def view_rows(
    backends: FeatureBackends,
    call: Call,
    blob: StoredObject,
    view: StoredView,
    *,
    strict: bool,
    memory: MemoryLease,
) -> ViewRows:
    """Return the rows of a blob that the caller may read, after the view's SQL and in the types of its columns.

    If `strict`, raise InvalidInput where they do not say themselves how they are to be read.
    """
    from falaj.features import arrow_tables

    required, columns = view.keys + _moments(view), stored_columns(view)
    texts = [each.name for each in view.keys + view.definition.columns if each.type is ColumnType.TEXT]
    options = {
        "texts": texts,
        "sql": view.definition.sql,
        "columns": [column.model_dump(mode="json") for column in columns],
        "required": [column.name for column in required],
        "where": f"view {view.definition.name}",
        "strict": strict,
    }
    rows, facts = _parse(backends, call, blob, VIEW_ROWS, options, memory)
    if rows.schema != arrow_tables.schema_of(columns):
        raise Internal(f"the parser returned {rows.schema.names}, not the columns of the view")
    return ViewRows(rows, tuple(shorten(note, limit=NOTE_CHARS) for note in facts["notes"][:MAX_NOTES]))


def content_hash(backends: FeatureBackends, call: Call, tx: Transaction, blob: StoredObject) -> str:
    """Return the SHA-256 of the bytes of a blob that the caller may read."""
    return str(_facts(backends, call, tx, blob).sha256)


def stored_columns(view: StoredView) -> tuple[Feature, ...]:
    """Return the columns of a view's table, without those of the platform."""
    return view.keys + _moments(view) + view.definition.columns


def file_columns(backends: FeatureBackends, call: Call, blob: StoredObject) -> tuple[list[FileColumn], int]:
    """Return the columns of a blob that the caller may read, and the number of its rows."""
    options = {"texts": [], "name": blob.name, "limit_bytes": MAX_ROWS_BYTES}
    facts = backends.parsers.parse(
        COLUMNS, [_source(backends, call, blob)], options, owner=call.caller.id
    ).facts
    try:
        columns = [
            FileColumn(str(name), None if kind is None else ColumnType(kind))
            for name, kind in facts["columns"]
        ]
        return columns, int(facts["rows"])
    except (KeyError, TypeError, ValueError) as error:  # of a parser process that was taken over
        raise Internal("the parser returned no columns") from error


def _moments(view: StoredView) -> tuple[Feature, ...]:
    named = (view.definition.event_time, view.definition.created_time)
    return tuple(Feature(name=name, type=ColumnType.MOMENT) for name in named if name)


def _parse(
    backends: FeatureBackends,
    call: Call,
    blob: StoredObject,
    parser: str,
    options: Mapping[str, Any],
    memory: MemoryLease,
) -> tuple[ArrowTable, Mapping[str, Any]]:
    """Return the rows that `parser` makes of a blob, and the facts that it tells."""
    from falaj.governance import arrow_ipc

    where, limit_bytes = f"blob {blob.name}", min(MAX_ROWS_BYTES, memory.total_bytes // 2)
    given = {**options, "name": blob.name, "limit_bytes": limit_bytes}
    parsed = backends.parsers.parse(
        parser, [_source(backends, call, blob)], given, owner=call.caller.id, reserve=memory.grow
    )
    rows = arrow_ipc.read_result(parsed.content, where=where, limit_bytes=memory.total_bytes)
    memory.grow(max(0, arrow_ipc.size_bytes(rows) - len(parsed.content)))
    return rows, parsed.facts


def _source(backends: FeatureBackends, call: Call, blob: StoredObject) -> ByteSource:
    gate = backends.gate
    with gate.database.read() as tx:
        row = _facts(backends, call, tx, blob)
    if row.size_bytes > MAX_SOURCE_BYTES:
        raise TooLarge(f"blob {blob.name} has {row.size_bytes} bytes; the limit is {MAX_SOURCE_BYTES}")
    store = backends.blobs[blob.zone or gate.zones.default.name]

    def read_range(offset: int, length: int) -> bytes:
        return b"".join(store.read(blob.workspace, row.key, start=offset, length=length))

    return ByteSource(row.size_bytes, read_range)


def _facts(backends: FeatureBackends, call: Call, tx: Transaction, blob: StoredObject) -> Row[Any]:
    backends.gate.require(call, "blobs.read", blob, tx=tx)
    return tx.execute(
        select(blobs.c.key, blobs.c.size_bytes, blobs.c.sha256).where(blobs.c.id == blob.id)
    ).one()
