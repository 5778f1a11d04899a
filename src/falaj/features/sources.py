"""Read the rows of uploaded blobs, if the caller may, through the parser process."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Row, select

from falaj.errors import Internal, TooLarge, shorten
from falaj.features.backends import FeatureBackends
from falaj.features.definitions import FileColumn
from falaj.governance.operations.call import Call
from falaj.governance.tables import blobs
from falaj.ports.machine.memory import MemoryLease
from falaj.ports.metadata import Transaction
from falaj.ports.parsers import ByteSource, Parsed
from falaj.ports.queries import ArrowTable
from falaj.records.features import BrokenRule, ColumnType, Feature, StoredView
from falaj.records.governance.objects import StoredObject

MAX_SOURCE_BYTES = 2 << 30
"""A source is read into memory as a whole; larger data must be uploaded in parts."""
MAX_ROWS_BYTES = 1 << 30
"""Largest size of the decoded rows of one source; less where the budget is small."""

NOTE_CHARS, MAX_NOTES = 300, 50

ROWS, VIEW_ROWS, COLUMNS, QUARANTINED_ROWS = "rows", "view_rows", "columns", "quarantined_rows"
"""The names of the parsers, see assembly/parsing.py."""


class ViewRows(NamedTuple):
    """Rows as a view stores them, and what was assumed to read them so.

    `invalid` are those that break rules of the view, as they came, and `broken` says which.
    """

    rows: ArrowTable
    notes: tuple[str, ...] = ()
    invalid: ArrowTable | None = None
    broken: tuple[BrokenRule, ...] = ()


def spine_rows(
    backends: FeatureBackends, call: Call, blob: StoredObject, *, texts: frozenset[str], memory: MemoryLease
) -> ArrowTable:
    """Return the rows of a blob that the caller may read. CSV columns in `texts` are parsed as text."""
    source = blob_source(backends, call, blob)
    parsed = _parse(backends, call, ROWS, source, {"name": blob.name, "texts": sorted(texts)}, memory)
    return _read(parsed.content, f"blob {blob.name}", memory)


def view_rows(
    backends: FeatureBackends,
    call: Call,
    blob: StoredObject,
    view: StoredView,
    *,
    strict: bool,
    backfill: bool,
    memory: MemoryLease,
) -> ViewRows:
    """Return the rows of a blob that the caller may read, after the view's SQL and in the types of its columns.

    If `strict`, raise InvalidInput where they do not say themselves how they are to be read.
    """
    columns = stored_columns(view)
    options = {
        "name": blob.name,
        "texts": [each.name for each in columns if each.type is ColumnType.TEXT],
        "typed": [each.name for each in columns if each.type is not ColumnType.TEXT],
        "sql": view.definition.sql,
        "rules": _rules(view, now=call.now, is_history=backfill or not view.rows),
        "where": f"view {view.definition.name}",
        "strict": strict,
    }
    parsed = _parse(backends, call, VIEW_ROWS, blob_source(backends, call, blob), options, memory)
    return _view_rows(parsed, view, f"blob {blob.name}", memory)


def rechecked_rows(
    backends: FeatureBackends, call: Call, source: ByteSource, view: StoredView, *, memory: MemoryLease
) -> ViewRows:
    """Return the rows of a quarantined batch, checked by the rules of the view as they are now.

    However many are still invalid, those of them are returned apart.
    """
    where = f"view {view.definition.name}"
    rules = _rules(view, now=call.now, is_history=True, invalid_rows="quarantine", max_invalid_share=1.0)
    for column in rules["columns"]:  # of whole files only
        column["max_null_rate"] = None
    options = {"name": "quarantine", "texts": [], "rules": rules, "where": where}
    parsed = _parse(backends, call, QUARANTINED_ROWS, source, options, memory)
    return _view_rows(parsed, view, where, memory)


def _rules(view: StoredView, *, now: datetime, is_history: bool, **changed: object) -> dict[str, Any]:
    """Return the rules of a view as the parsers take them. History need not be fresh."""
    from falaj.features.validation.checks import RowRules

    given, required = view.definition, [column.name for column in view.keys + _moments(view)]
    rules = RowRules(
        columns=stored_columns(view),
        required=tuple(required),
        event_time=given.event_time,
        latest=_moved(now, given.max_ahead),
        fresh_since=None if is_history or given.freshness is None else _moved(now, -given.freshness),
        unique=tuple(required) if given.unique else (),
        invalid_rows=given.invalid_rows,
        max_invalid_share=given.max_invalid_share,
    )
    return rules.model_dump(mode="json") | changed


def _moved(now: datetime, by: timedelta | None) -> datetime | None:
    """Return a moment so much later; none without a limit, or if there is no such moment."""
    try:
        return None if by is None else now + by
    except OverflowError:
        return None


def _view_rows(parsed: Parsed, view: StoredView, where: str, memory: MemoryLease) -> ViewRows:
    """Return what a parser made of rows, after checking it: the process may have been taken over."""
    from falaj.features import arrow_tables
    from falaj.features.validation.checks import BROKEN, BROKEN_TYPE, ROW

    facts, columns = parsed.facts, stored_columns(view)
    try:
        notes = tuple(shorten(str(note), limit=NOTE_CHARS) for note in facts["notes"][:MAX_NOTES])
        end = int(facts.get("invalid_from", len(parsed.content)))
        broken = tuple(BrokenRule.model_validate(each) for each in facts.get("broken", ()))
    except (KeyError, TypeError, ValueError) as error:
        raise Internal("the parser returned no rows") from error
    content = memoryview(parsed.content)
    rows = _read(content[:end], where, memory)
    if rows.schema != arrow_tables.schema_of(columns):
        raise Internal(f"the parser returned {rows.schema.names}, not the columns of the view")
    if end == len(content):
        return ViewRows(rows, notes)
    invalid = _read(content[end:], where, memory)
    if invalid.schema.names != [*(column.name for column in columns), ROW, BROKEN] or (
        invalid.schema.field(BROKEN).type != BROKEN_TYPE
    ):
        raise Internal(f"the parser returned {invalid.schema.names}, not invalid rows of the view")
    return ViewRows(rows, notes, invalid, broken)


def content_hash(backends: FeatureBackends, call: Call, tx: Transaction, blob: StoredObject) -> str:
    """Return the SHA-256 of the bytes of a blob that the caller may read."""
    return str(_facts(backends, call, tx, blob).sha256)


def stored_columns(view: StoredView) -> tuple[Feature, ...]:
    """Return the columns of a view's table, without those of the platform."""
    return view.keys + _moments(view) + view.definition.columns


def file_columns(backends: FeatureBackends, call: Call, blob: StoredObject) -> tuple[list[FileColumn], int]:
    """Return the columns of a blob that the caller may read, and the number of its rows."""
    options = {"texts": [], "name": blob.name, "limit_bytes": MAX_ROWS_BYTES}
    source = blob_source(backends, call, blob)
    facts = backends.parsers.parse(COLUMNS, [source], options, owner=call.caller.id).facts
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
    parser: str,
    source: ByteSource,
    options: Mapping[str, Any],
    memory: MemoryLease,
) -> Parsed:
    given = {**options, "limit_bytes": min(MAX_ROWS_BYTES, memory.total_bytes // 2)}
    return backends.parsers.parse(parser, [source], given, owner=call.caller.id, reserve=memory.grow)


def _read(content: Any, where: str, memory: MemoryLease) -> ArrowTable:
    """Return rows that a parser made, validated; their content is held in `memory` already."""
    from falaj.governance import arrow_ipc

    rows = arrow_ipc.read_result(content, where=where, limit_bytes=memory.total_bytes)
    memory.grow(max(0, arrow_ipc.size_bytes(rows) - len(content)))
    return rows


def blob_source(backends: FeatureBackends, call: Call, blob: StoredObject) -> ByteSource:
    """Return the bytes of a blob that the caller may read."""
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
