"""The port for metadata: one relational schema, transactions, and the column types that all databases share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from sqlalchemy import BigInteger, Dialect, MetaData, Select, Table, Text
from sqlalchemy.engine import CursorResult
from sqlalchemy.sql import Executable
from sqlalchemy.types import TypeDecorator

METADATA = MetaData()
"""The tables of all services. A test compares the migrations with it."""

RECORDED = "recorded"


def recorded(*columns: str) -> dict[str, Any]:
    """Return the `info` of a table of which the audit log records these columns only; by default it records all."""
    return {RECORDED: columns}


UNRECORDED = recorded()
"""The `info` of a table that the audit log does not record: counters, queues, caches, and what changes by itself."""

encode_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
"""JSON as `JsonText` stores it."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def to_micros(moment: datetime) -> int:
    """Return `moment` as it is stored: microseconds since 1970."""
    return (moment - _EPOCH) // _MICROSECOND


def from_micros(stored: int) -> datetime:
    """Return the moment that `to_micros` stored."""
    return _EPOCH + timedelta(0, 0, stored)


class UtcTime(TypeDecorator[datetime]):
    """A moment, stored as microseconds since 1970: sortable, and the same on every database."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        return None if value is None else to_micros(value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[int | None], datetime | None]:
        """Return the conversion itself: by way of `process_result_value` it takes twice as long."""
        return _moment


def _moment(stored: int | None) -> datetime | None:
    return None if stored is None else from_micros(stored)


class JsonText(TypeDecorator[Any]):
    """A JSON value, stored as text."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else encode_json(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class Prepared:
    """A SELECT of a fixed shape, which is compiled once for each kind of database; its parameters are bindparams."""

    __slots__ = ("plans", "query")

    def __init__(self, query: Select[Any]) -> None:
        self.query = query
        self.plans: dict[str, Any] = {}
        """The compiled query by the name of the dialect; drivers keep it here."""


class Transaction(Protocol):
    """Statements that take effect together or not at all.

    `row_lock` ends a plain SELECT so that it locks its rows; it is empty where writers run one at a time.
    """

    row_lock: str

    def server_time(self) -> datetime | None:
        """Return the time of the database server, one clock for all machines; none where the database is a file."""
        ...

    def execute(
        self,
        statement: Executable,
        parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        /,
    ) -> CursorResult[*tuple[Any, ...]]:
        """Run a SQLAlchemy statement."""
        ...

    def execute_sql(self, sql: str, values: Sequence[Any] = (), /) -> list[tuple[Any, ...]]:
        """Run plain SQL without SQLAlchemy and return its rows: parameters as `?`, values as the database stores them.

        For the few statements on the hot path of every call: ten times faster than `execute` (see decision 0004).
        """
        ...

    def fetch(self, query: Prepared, parameters: Mapping[str, Any], /) -> list[dict[str, Any]]:
        """Return the rows of a prepared query by column, as `execute` would: for statements that are frequent."""
        ...

    def insert(self, table: Table, row: Mapping[str, Any], /) -> None:
        """Insert one row, as `execute` of an insert with these values would: for statements that are frequent."""
        ...

    def update(self, table: Table, key: Mapping[str, Any], values: Mapping[str, Any], /) -> None:
        """Change the row with this primary key, as `execute` of an update would: for statements that are frequent."""
        ...

    def bulk_insert(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], /) -> int:
        """Insert rows by the fastest way that the database has, and return how many there were."""
        ...


class Database(Protocol):
    """Transactions on the metadata schema. A transaction commits when its block ends, and rolls back if it raises.

    They raise Unavailable if the database cannot be reached or is busy for too long, Conflict if a concurrent change
    violates a constraint, and Damaged if the database is corrupt.
    """

    def read(self) -> AbstractContextManager[Transaction]:
        """Begin a transaction that only reads. It never waits for writers."""
        ...

    def write(self) -> AbstractContextManager[Transaction]:
        """Begin a transaction that may write. Writers run one at a time where the engine requires it."""
        ...

    def purge_deleted(self) -> None:
        """Erase deleted rows from the database files, as far as the engine supports it."""
        ...

    def close(self) -> None: ...
