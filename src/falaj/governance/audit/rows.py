"""Recorded rows: the digests of the rows that a transaction changed, before and after, for its audit entry.

Every table is recorded unless it is declared otherwise (`info=recorded(…)`, `info=UNRECORDED`). The digest before a
change makes a chain of the changes of each row: a row that was altered outside the platform breaks it, also if an
operation changes it again later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from hashlib import blake2b
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import Boolean, Double, Integer, LargeBinary, Table, select
from sqlalchemy.engine import CursorResult
from sqlalchemy.sql import Executable, operators
from sqlalchemy.sql.elements import BinaryExpression, BindParameter, BooleanClauseList
from sqlalchemy.sql.schema import Column

from falaj.ports.metadata import (
    METADATA,
    RECORDED,
    JsonText,
    Prepared,
    Transaction,
    UtcTime,
    encode_json,
    to_micros,
)

DIGEST_BYTES = 16
_encode = json.JSONEncoder(separators=(",", ":")).encode

Digest = Callable[[str], str]
"""The keyed digest of a row's text."""

Key = tuple[Any, ...]


class RowChange(NamedTuple):
    """A row that was changed: the digest before and after, none where there was no row."""

    table: str
    key: Key
    was: str | None
    now: str | None


def row_digest(secret: bytes) -> Digest:
    """Return the digest of rows under `secret`: keyed, so that an export does not give away what a row contains."""

    empty = blake2b(key=secret, digest_size=DIGEST_BYTES)  # a keyed hash, and quicker than HMAC

    def digest(text: str) -> str:
        state = empty.copy()
        state.update(text.encode())
        return state.hexdigest()

    return digest


class RowShape:
    """How the rows of a recorded table are found, and written as text to digest: null columns are left out."""

    def __init__(self, table: Table, columns: Iterable[str]) -> None:
        self.name = table.name
        self.table = table
        self.key = tuple(column.name for column in table.primary_key)
        self.columns = tuple(sorted({*columns, *self.key}))
        self._given = [(name, _given(table.c[name])) for name in self.columns]
        self._stored = [(name, _stored(table.c[name])) for name in self.columns]
        self._key_at = [self.columns.index(name) for name in self.key]
        names, marks = ", ".join(f'"{n}"' for n in self.columns), " AND ".join(f'"{n}" = ?' for n in self.key)
        self.all_rows = f"SELECT {names} FROM {table.name}"  # noqa: S608 - names of our own tables
        self.by_key = f"{self.all_rows} WHERE {marks}"
        self.keys = select(*table.primary_key)
        made = (table.c[name] for name in self.columns)
        self.has_defaults = any(
            column.default is not None or column.server_default is not None for column in made
        )

    def given_text(self, row: Mapping[str, Any]) -> str:
        """Return the text of a row that is inserted with these values."""
        parts = [self.name]
        for name, convert in self._given:
            value = row.get(name)
            if value is not None:
                parts += (name, value if convert is None else convert(value))
        return _encode(parts)

    def stored_text(self, row: Sequence[Any]) -> str:
        """Return the text of a row as the database has it."""
        parts = [self.name]
        for (name, convert), value in zip(self._stored, row, strict=True):
            if value is not None:
                parts += (name, value if convert is None else convert(value))
        return _encode(parts)

    def key_of(self, row: Sequence[Any]) -> Key:
        """Return the key of a row as the database has it."""
        return tuple(_plain(row[at]) for at in self._key_at)

    def given_key(self, row: Mapping[str, Any]) -> Key:
        return tuple(_plain(row[name]) for name in self.key)

    def bound(self, key: Key) -> list[Any]:
        """Return a key as the database binds it."""
        kinds = (self.table.c[name].type for name in self.key)
        return [
            bytes.fromhex(part) if isinstance(kind, LargeBinary) else part
            for kind, part in zip(kinds, key, strict=True)
        ]

    def is_touched_by(self, statement: Any) -> bool:
        """Tell whether an update sets a recorded column; what it sets by parameters alone is not looked at."""
        values = statement._values
        return not values or any(getattr(column, "name", column) in self.columns for column in values)

    def key_in(self, where: Any, parameters: Mapping[str, Any]) -> Key | None:
        """Return the key that a WHERE clause compares with; none if it does not name one row."""
        parts = (
            where.clauses
            if isinstance(where, BooleanClauseList) and where.operator is operators.and_
            else [where]
        )
        found = {
            part.left.name: parameters.get(part.right.key, part.right.effective_value)
            for part in parts
            if isinstance(part, BinaryExpression)
            and part.operator is operators.eq
            and isinstance(part.left, Column)
            and isinstance(part.right, BindParameter)
        }
        key = tuple(found.get(name) for name in self.key)
        return None if None in key else tuple(_plain(part) for part in key)


@cache
def shape_of(table: Table) -> RowShape | None:
    """Return the shape of a recorded table; none for others."""
    columns = table.info.get(RECORDED)
    names = table.c.keys() if columns is None else columns
    return RowShape(table, names) if names else None


def recorded_shapes() -> list[RowShape]:
    """Return the shapes of all recorded tables, by name."""
    found = (shape_of(table) for _, table in sorted(METADATA.tables.items()))
    return [shape for shape in found if shape is not None]


def stored_rows(tx: Transaction, shape: RowShape, digest: Digest) -> Iterator[tuple[Key, str]]:
    """Return the keys and digests of all rows of a table."""
    for row in tx.execute_sql(shape.all_rows):
        yield shape.key_of(row), digest(shape.stored_text(row))


def stored_row(tx: Transaction, shape: RowShape, key: Key, digest: Digest) -> str | None:
    """Return the digest of one row, none if it is not there."""
    rows = tx.execute_sql(shape.by_key, shape.bound(key))
    return digest(shape.stored_text(rows[0])) if rows else None


class RecordedTransaction:
    """A transaction that remembers the recorded rows that it changes, until `changes` are taken."""

    __slots__ = ("_digest", "_rows", "_taken", "_tx", "row_lock")

    def __init__(self, tx: Transaction, digest: Digest) -> None:
        self._tx = tx
        self._digest = digest
        self._rows: dict[
            tuple[RowShape, Key], list[str | None]
        ] = {}  # before, after; one alone: to be read again
        self._taken: list[RowChange] = []
        self.row_lock = tx.row_lock

    def server_time(self) -> datetime | None:
        return self._tx.server_time()

    def execute(
        self,
        statement: Executable,
        parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        /,
    ) -> CursorResult[*tuple[Any, ...]]:
        shape = shape_of(statement.table) if statement.is_dml else None  # type: ignore[attr-defined]
        if shape is None:
            return self._tx.execute(statement, parameters)
        if statement.is_insert:
            result = self._tx.execute(statement, parameters)
            self._note_inserts(shape, parameters)
            return result
        if statement.is_delete or shape.is_touched_by(statement):
            self._note_before(shape, statement, parameters)
        return self._tx.execute(statement, parameters)

    def execute_sql(self, sql: str, values: Sequence[Any] = (), /) -> list[tuple[Any, ...]]:
        plan = _plan(sql)
        rows = self._tx.execute_sql(sql, values)
        if plan is not None and rows:  # a row came back: it was inserted
            self._note_inserts(plan[0], dict(zip(plan[1], values, strict=True)))
        return rows

    def fetch(self, query: Prepared, parameters: Mapping[str, Any], /) -> list[dict[str, Any]]:
        return self._tx.fetch(query, parameters)

    def insert(self, table: Table, row: Mapping[str, Any], /) -> None:
        self._tx.insert(table, row)
        shape = shape_of(table)
        if shape is not None:
            self._note_inserts(shape, row)

    def update(self, table: Table, key: Mapping[str, Any], values: Mapping[str, Any], /) -> None:
        shape = shape_of(table)
        if shape is not None and not values.keys().isdisjoint(shape.columns):
            self._note_row_before(shape, shape.given_key(key))
        self._tx.update(table, key, values)

    def bulk_insert(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], /) -> int:
        if shape_of(METADATA.tables[table]) is not None:
            raise RuntimeError(f"rows of {table} are recorded: insert them with execute")
        return self._tx.bulk_insert(table, columns, rows)

    def take(self, changes: Iterable[RowChange]) -> None:
        """Take changes that were made elsewhere as changes of this transaction."""
        self._taken += changes

    def changes(self) -> list[RowChange]:
        """Return the rows that changed since the last time, by table and key."""
        found, self._taken = self._taken, []
        for (shape, key), digests in self._rows.items():
            was, now = digests if len(digests) == 2 else (digests[0], self._stored_digest(shape, key))
            if was != now:
                found.append(RowChange(shape.name, key, was, now))
        self._rows.clear()
        return sorted(found, key=itemgetter(0, 1))

    def _note_inserts(self, shape: RowShape, parameters: Any) -> None:
        rows = [parameters] if isinstance(parameters, Mapping) else parameters
        if rows is None:
            raise RuntimeError(f"rows of {shape.name} are recorded: give them as parameters of the insert")
        for row in rows:
            known = self._rows.setdefault((shape, shape.given_key(row)), [None])
            known[1:] = [] if shape.has_defaults else [self._digest(shape.given_text(row))]

    def _note_before(self, shape: RowShape, statement: Any, parameters: Any) -> None:
        """Remember the rows that a statement is about to change, and lock them: no other change comes between."""
        for given in [parameters] if parameters is None or isinstance(parameters, Mapping) else parameters:
            key = shape.key_in(statement.whereclause, given or {})
            for each in [key] if key is not None else self._keys_found(shape, statement, given):
                self._note_row_before(shape, each)

    def _note_row_before(self, shape: RowShape, key: Key) -> None:
        if (shape, key) not in self._rows:
            self._rows[shape, key] = [self._stored_digest(shape, key, lock=self.row_lock)]
        del self._rows[shape, key][1:]

    def _keys_found(self, shape: RowShape, statement: Any, parameters: Any) -> Iterator[Key]:
        query = shape.keys
        if statement.whereclause is not None:
            query = query.where(statement.whereclause)
        rows = self._tx.execute(query.with_for_update(key_share=True), parameters).all()
        return (tuple(_plain(part) for part in row) for row in rows)

    def _stored_digest(self, shape: RowShape, key: Key, *, lock: str = "") -> str | None:
        rows = self._tx.execute_sql(shape.by_key + lock, shape.bound(key))
        return self._digest(shape.stored_text(rows[0])) if rows else None


_WRITE = re.compile(r"\s*(INSERT INTO|UPDATE|DELETE FROM)\s+(\w+)\s*(?:\(([\w, ]+)\))?")


@cache
def _plan(sql: str) -> tuple[RowShape, list[str]] | None:
    """Return the table and columns of plain SQL that inserts into a recorded table; none for other statements."""
    found = _WRITE.match(sql)
    shape = shape_of(METADATA.tables[found[2]]) if found and found[2] in METADATA.tables else None
    if found is None or shape is None:
        return None
    if found[1] != "INSERT INTO" or not found[3] or "ON CONFLICT DO NOTHING RETURNING" not in sql:
        raise RuntimeError(f"rows of {found[2]} are recorded: change them with execute")
    return shape, [name.strip() for name in found[3].split(",")]


def _given(column: Column[Any]) -> Callable[[Any], Any] | None:
    """Return how a given value becomes what `_stored` makes of the stored one."""
    kind = column.type
    if isinstance(kind, UtcTime):
        return to_micros
    return encode_json if isinstance(kind, JsonText) else _stored(column)


def _stored(column: Column[Any]) -> Callable[[Any], Any] | None:
    kind = column.type
    if isinstance(kind, LargeBinary):
        return _hex
    if isinstance(kind, Boolean):
        return bool
    if isinstance(kind, Double):
        return float
    return int if isinstance(kind, Integer) else None


def _hex(value: Any) -> str:
    return bytes(value).hex()


def _plain(part: Any) -> Any:
    """Return a part of a key as JSON has it."""
    if isinstance(part, bytes | memoryview):
        return bytes(part).hex()
    return str(part) if isinstance(part, str) else part
