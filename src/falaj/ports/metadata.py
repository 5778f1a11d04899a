"""Where facts lie: one relational schema, transactions, and the types that both databases share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from sqlalchemy import BigInteger, Dialect, MetaData, Text
from sqlalchemy.engine import CursorResult
from sqlalchemy.sql import Executable
from sqlalchemy.types import TypeDecorator

METADATA = MetaData()
"""Every room's tables hang on this; migrations are compared with it."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def to_micros(moment: datetime) -> int:
    """How a moment is stored: microseconds since 1970."""
    return (moment - _EPOCH) // _MICROSECOND


def from_micros(stored: int) -> datetime:
    return _EPOCH + timedelta(microseconds=stored)


class UtcTime(TypeDecorator[datetime]):
    """A moment, stored as microseconds since 1970: it sorts, and is the same on both databases."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        return None if value is None else to_micros(value)

    def process_result_value(self, value: int | None, dialect: Dialect) -> datetime | None:
        return None if value is None else from_micros(value)


class JsonText(TypeDecorator[Any]):
    """A JSON value, stored as text."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value, sort_keys=True, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class Transaction(Protocol):
    """Statements that take effect together or not at all."""

    def execute(
        self,
        statement: Executable,
        parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        /,
    ) -> CursorResult[*tuple[Any, ...]]: ...

    def execute_sql(self, sql: str, values: Sequence[Any] = (), /) -> list[tuple[Any, ...]]:
        """The rows of a hot statement, past SQLAlchemy: plain SQL with `?`, values as the database stores them.

        For the few statements that every call runs; ten times quicker than `execute` (see decision 0004).
        """
        ...

    def bulk_insert(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], /) -> int:
        """Insert many rows by the quickest way that the database has; how many."""
        ...


class Database(Protocol):
    """Transactions on the one schema. `write` serializes writers where the engine must; `read` never waits for them."""

    def read(self) -> AbstractContextManager[Transaction]: ...

    def write(self) -> AbstractContextManager[Transaction]: ...

    def purge_deleted(self) -> None:
        """Make what was deleted disappear from the files as far as the engine can do that."""
        ...

    def close(self) -> None: ...
