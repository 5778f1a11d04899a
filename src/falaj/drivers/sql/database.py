"""Transactions on SQLite (WAL, durable at commit) and PostgreSQL."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import CursorResult
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool
from sqlalchemy.sql import Executable

from falaj.errors import Conflict, Damaged, Unavailable
from falaj.ports.metadata import Database, Transaction

log = logging.getLogger("falaj.metadata")

IDLE_TRANSACTION_TIMEOUT_S = 15
BUSY_TIMEOUT_S = 15.0
SQLITE_READERS = 2
"""Connections that read at once. More only make Python's threads fight over the interpreter lock: with 16 callers, 8
readers gave 1,885 gated reads/s here, 4 gave 2,173, and 2 gave 2,467."""

POSTGRES_CONNECTIONS = 16


def open_database(url: str) -> Database:
    """Open the database at `url`, whose schema is up to date (see `migrate`)."""
    return SqliteDatabase(url) if url.startswith("sqlite") else PostgresDatabase(url)


class SqlTransaction:
    """A SQLAlchemy connection in its transaction, and the driver's connection for plain SQL."""

    __slots__ = ("_connection", "_percent", "_raw")

    def __init__(self, connection: sa.Connection, *, percent: bool) -> None:
        self._connection = connection
        self._raw: Any = connection.connection.driver_connection
        self._percent = percent

    def execute(
        self,
        statement: Executable,
        parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        /,
    ) -> CursorResult[*tuple[Any, ...]]:
        return self._connection.execute(statement, parameters)

    def execute_sql(self, sql: str, values: Sequence[Any] = (), /) -> list[tuple[Any, ...]]:
        cursor = self._raw.execute(sql.replace("?", "%s") if self._percent else sql, values)
        rows: list[tuple[Any, ...]] = cursor.fetchall() if cursor.description else []
        return rows

    def bulk_insert(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], /) -> int:
        names = ", ".join(columns)
        if self._percent:
            return self._copy(f"COPY {table} ({names}) FROM STDIN", rows)
        marks = ", ".join("?" * len(columns))
        statement = f"INSERT INTO {table} ({names}) VALUES ({marks})"  # noqa: S608 - names from our own code
        cursor = self._raw.executemany(statement, rows)
        return int(cursor.rowcount)

    def _copy(self, statement: str, rows: Iterable[Sequence[Any]]) -> int:
        count = 0
        with self._raw.cursor() as cursor, cursor.copy(statement) as copy:
            for row in rows:
                copy.write_row(row)
                count += 1
        return count


class SqliteDatabase:
    """Readers never wait for a writer. One writer at a time in this process, and a busy timeout for other processes."""

    def __init__(self, url: str) -> None:
        self._readers = _Connections(sqlite_engine(url, begin="BEGIN"), SQLITE_READERS)
        self._writer = _Connections(sqlite_engine(url, begin="BEGIN IMMEDIATE"), 1)
        self._thread = threading.local()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        if getattr(self._thread, "reads", False):  # a nested read could wait for itself
            raise RuntimeError("nested read transaction: pass the outer one on")
        self._thread.reads = True
        try:
            with translate_errors(), self._readers.begin() as tx:
                yield tx
        finally:
            self._thread.reads = False

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        with translate_errors(), self._writer.begin() as tx:
            yield tx

    def purge_deleted(self) -> None:
        with self._writer.idle() as raw:
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._readers.close()
        self._writer.close()


class _Connections:
    """A small pool of open connections, which is cheaper per call than SQLAlchemy's pool."""

    def __init__(self, engine: sa.Engine, count: int) -> None:
        self._engine = engine
        self._idle: queue.LifoQueue[sa.Connection | None] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(None)

    @contextmanager
    def begin(self) -> Iterator[Transaction]:
        try:
            connection = self._idle.get(timeout=BUSY_TIMEOUT_S)
        except queue.Empty:
            raise Unavailable("the metadata database is busy: no connection became free in time") from None
        try:
            connection = connection or self._engine.connect()
            with connection.begin():
                yield SqlTransaction(connection, percent=False)
        finally:
            self._idle.put(connection)

    @contextmanager
    def idle(self) -> Iterator[Any]:
        """Yield the driver's connection outside of any transaction."""
        connection = self._idle.get(timeout=BUSY_TIMEOUT_S)
        try:
            connection = connection or self._engine.connect()
            yield connection.connection.driver_connection
        finally:
            self._idle.put(connection)

    def close(self) -> None:
        while not self._idle.empty():
            connection = self._idle.get_nowait()
            if connection is not None:
                connection.close()
        self._engine.dispose()


class PostgresDatabase:
    """Transactions at the level read committed. Callers lock rows where interleaving matters."""

    def __init__(self, url: str) -> None:
        self._engine = sa.create_engine(
            url,
            pool_size=POSTGRES_CONNECTIONS,
            max_overflow=POSTGRES_CONNECTIONS,
            pool_timeout=30,
            pool_pre_ping=True,
        )
        sa.event.listen(self._engine, "connect", _limit_idle_transactions)

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        with self.write() as tx:
            yield tx

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        with translate_errors(), self._engine.begin() as connection:
            yield SqlTransaction(connection, percent=True)

    def purge_deleted(self) -> None:
        """Do nothing: PostgreSQL reuses the space, and its administrator decides how long the log is kept."""

    def close(self) -> None:
        self._engine.dispose()


def _limit_idle_transactions(connection: Any, _record: Any) -> None:
    """Limit idle transactions, so that a frozen process does not hold its locks forever, such as that of the lease."""
    connection.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_TRANSACTION_TIMEOUT_S}s'")
    connection.commit()


def sqlite_engine(url: str, *, begin: str) -> sa.Engine:
    engine = sa.create_engine(
        url, poolclass=NullPool, connect_args={"check_same_thread": False, "timeout": BUSY_TIMEOUT_S}
    )

    @sa.event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # disables the driver's own BEGIN; ours follows
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        raw: Any = connection.connection.driver_connection
        raw.execute(begin)

    return engine


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate errors of the driver: Unavailable if the database is down or busy, Conflict for a constraint."""
    try:
        yield
    except sa.exc.TimeoutError as error:
        raise Unavailable("the metadata database is busy: no connection became free in time") from error
    except Exception as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        if _is_driver_error(cause, "OperationalError") or _is_driver_error(
            cause, "IdleInTransactionSessionTimeout"
        ):
            log.warning("metadata database unavailable", extra={"reason": str(cause)})
            raise Unavailable("the metadata database is unavailable; see the log") from error
        if _is_driver_error(cause, "DatabaseError") and type(cause).__name__ == "DatabaseError":
            raise Damaged(f"the metadata database is damaged: {cause}") from error
        if _is_driver_error(cause, "IntegrityError"):
            raise Conflict("another change was made at the same time; try again") from error
        raise


def _is_driver_error(error: BaseException | None, name: str) -> bool:
    """Return whether a driver raised an error of class `name`; both drivers use the same names."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] in ("sqlite3", "psycopg")
        for kind in type(error).__mro__
    )
