"""Transactions on SQLite (WAL, durable at commit) and PostgreSQL."""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import CursorResult
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool
from sqlalchemy.sql import Executable

from falaj.drivers.sql.plans import SelectPlan, converted, insert_plan, update_plan
from falaj.errors import Conflict, Damaged, FalajError, Unavailable
from falaj.ports.metadata import Database, Prepared, Transaction, from_micros

log = logging.getLogger("falaj.metadata")

IDLE_TRANSACTION_TIMEOUT_S = 15
BUSY_TIMEOUT_S = 15.0
OLDEST_SQLITE = (3, 35)
"""The first that knows RETURNING, which our statements and those of dbos use."""

SQLITE_READERS = 2
"""Connections that read at once. More only make Python's threads fight over the interpreter lock: with 16 callers, 8
readers gave 1,885 gated reads/s here, 4 gave 2,173, and 2 gave 2,467."""

OVERTAKING_S = 0.05
"""How long a thread that waits for a connection may be overtaken."""

POSTGRES_CONNECTIONS = 16

DISK_FULL = (
    "the disk of the metadata database is full; free some space on it, and try again: what was acknowledged is safe, "
    "and nothing was changed"
)
DAMAGED = (
    "the metadata database is damaged: its file has bytes that it never wrote; stop the platform, keep a copy of the "
    "file, and restore a backup: falaj restore DIR"
)
NOT_WRITABLE = (
    "the metadata database cannot be opened for writing: its file or its folder has another owner or mode, or the disk "
    "is mounted read-only; see falaj doctor"
)


_SERVER_TIME = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"


def open_database(url: str, *, session: str | None = None) -> Database:
    """Open the database at `url`, whose schema is up to date (see `migrate`); `session` names those of PostgreSQL."""
    return SqliteDatabase(url) if url.startswith("sqlite") else PostgresDatabase(url, session=session)


class SqlTransaction:
    """A SQLAlchemy connection in its transaction, and the driver's connection for plain SQL."""

    __slots__ = ("_connection", "_percent", "_raw", "row_lock")

    def __init__(self, connection: sa.Connection, *, percent: bool) -> None:
        self._connection = connection
        self._raw: Any = connection.connection.driver_connection
        self._percent = percent
        self.row_lock = " FOR NO KEY UPDATE" if percent else ""

    def server_time(self) -> datetime | None:
        return from_micros(int(self.execute_sql(_SERVER_TIME)[0][0])) if self._percent else None

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

    def fetch(self, query: Prepared, parameters: Mapping[str, Any], /) -> list[dict[str, Any]]:
        dialect = self._connection.dialect
        plan: SelectPlan | None = query.plans.get(dialect.name)
        if plan is None:
            plan = query.plans[dialect.name] = SelectPlan(query.query, dialect)
        return plan.rows(self._raw.execute(plan.sql, plan.bound(parameters)))

    def insert(self, table: sa.Table, row: Mapping[str, Any], /) -> None:
        sql, convert = insert_plan(self._connection.dialect, table, tuple(row))
        self._change(sql, converted(convert, row.values()))

    def update(self, table: sa.Table, key: Mapping[str, Any], values: Mapping[str, Any], /) -> None:
        sql, convert = update_plan(self._connection.dialect, table, tuple(key), tuple(values))
        self._change(sql, converted(convert, [*values.values(), *key.values()]))

    def _change(self, sql: str, values: Sequence[Any]) -> None:
        try:
            self._raw.execute(sql, values)
        except Exception as error:
            if _is_driver_error(error, "IntegrityError"):
                raise sa.exc.IntegrityError(sql, None, error) from error
            raise

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
        self._readers = _Connections(url, begin="BEGIN", count=SQLITE_READERS)
        self._writer = _Connections(url, begin="BEGIN IMMEDIATE", count=1)
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
        with translate_errors(), self._writer.idle() as raw:
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._readers.close()
        self._writer.close()


class _Connections:
    """A small pool of open connections, which is cheaper per call than SQLAlchemy's pool.

    A thread that comes back at once may overtake those that wait, which saves switches, but not one that has waited for
    long.
    """

    def __init__(self, url: str, *, begin: str, count: int) -> None:
        self._engine = sqlite_engine(url, begin=begin)
        self._begin = begin
        self._idle: list[sa.Connection | None] = [None] * count
        self._lock = threading.Lock()
        self._waiting: deque[_Waiter] = deque()

    @contextmanager
    def begin(self) -> Iterator[Transaction]:
        connection = self._take()
        try:
            connection = connection or self._engine.connect()
            raw: Any = connection.connection.driver_connection
            raw.execute(self._begin)  # SQLAlchemy joins it when it is first used: see `sqlite_engine`
            try:
                yield SqlTransaction(connection, percent=False)
                (connection if connection.in_transaction() else raw).commit()
            except BaseException:
                connection = _rolled_back(connection)
                raise
        finally:
            self._give_back(connection)

    @contextmanager
    def idle(self) -> Iterator[Any]:
        """Yield the driver's connection outside of any transaction."""
        connection = self._take()
        try:
            connection = connection or self._engine.connect()
            yield connection.connection.driver_connection
        finally:
            self._give_back(connection)

    def close(self) -> None:
        with self._lock:
            for connection in filter(None, self._idle):
                connection.close()
            self._idle.clear()
        self._engine.dispose()

    def _take(self) -> sa.Connection | None:
        with self._lock:
            if self._idle and not self._is_late():
                return self._idle.pop()
            waiter = _Waiter()
            self._waiting.append(waiter)
        until = waiter.since + BUSY_TIMEOUT_S
        while waiter.woken.wait(max(0.0, until - time.monotonic())):
            with self._lock:
                waiter.woken.clear()
                if self._idle and (not self._is_late() or self._waiting[0] is waiter):
                    self._leave(waiter)
                    return self._idle.pop()
        with self._lock:
            self._leave(waiter)
        raise Unavailable("the metadata database is busy: no connection became free in time")

    def _give_back(self, connection: sa.Connection | None) -> None:
        with self._lock:
            self._idle.append(connection)
            if self._waiting:
                self._waiting[0].woken.set()

    def _leave(self, waiter: _Waiter) -> None:
        """Stop waiting, and wake the next one: there may be a connection for it as well."""
        self._waiting.remove(waiter)
        if self._waiting:
            self._waiting[0].woken.set()

    def _is_late(self) -> bool:
        """Tell whether the first thread that waits may no longer be overtaken."""
        return bool(self._waiting) and time.monotonic() - self._waiting[0].since > OVERTAKING_S


def _rolled_back(connection: sa.Connection) -> sa.Connection | None:
    """Return the connection without a transaction, or none if the disk does not even allow that.

    A commit that failed, as on a full disk, leaves both SQLAlchemy and the driver in one, each in its own way.
    """
    raw: Any = connection.connection.driver_connection
    try:
        connection.rollback()
        if raw.in_transaction:
            raw.rollback()
    except Exception:
        with suppress(Exception):
            connection.invalidate()
            connection.close()
        return None
    return connection


class _Waiter:
    """A thread that waits for a connection. The first one is woken when there may be one for it."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.woken = threading.Event()


class PostgresDatabase:
    """Transactions at the level read committed. Callers lock rows where interleaving matters."""

    def __init__(self, url: str, *, session: str | None = None) -> None:
        self._engine = sa.create_engine(
            url,
            connect_args={} if session is None else {"application_name": session},
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
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise Unavailable(
            f"the SQLite of this Python is {sqlite3.sqlite_version}, and the metadata database needs "
            f"{'.'.join(map(str, OLDEST_SQLITE))} or newer; use a Python that has one, or PostgreSQL"
        )
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
        if not raw.in_transaction:
            raw.execute(begin)

    return engine


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate errors of the driver: Unavailable if the database is down, busy or full, Damaged, Conflict."""
    try:
        yield
    except sa.exc.TimeoutError as error:
        raise Unavailable("the metadata database is busy: no connection became free in time") from error
    except Exception as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        if _is_driver_error(cause, "IntegrityError") and not _is_bad_value(cause):
            raise Conflict("another change was made at the same time; try again") from error
        failure = _failure_of(cause) if _is_driver_error(cause, "DatabaseError") else None
        if failure is None:
            raise
        log.warning("metadata database failed", extra={"reason": str(cause)})
        raise failure from error


SQLITE_FAILURES: dict[str, tuple[type[FalajError], str]] = {
    "SQLITE_FULL": (Unavailable, DISK_FULL),
    "SQLITE_CORRUPT": (Damaged, DAMAGED),
    "SQLITE_NOTADB": (Damaged, DAMAGED),
    "SQLITE_BUSY": (
        Unavailable,
        "the metadata database is locked: another process has written for too long; try again, and end whatever else "
        "has opened falaj.db",
    ),
    "SQLITE_READONLY": (Unavailable, NOT_WRITABLE),
    "SQLITE_PERM": (Unavailable, NOT_WRITABLE),
    "SQLITE_AUTH": (Unavailable, NOT_WRITABLE),
    "SQLITE_CANTOPEN": (Unavailable, NOT_WRITABLE),
    "SQLITE_IOERR": (
        Unavailable,
        "the disk of the metadata database fails, or is full: the system reports an error of reading or writing; see "
        "the log and the system's log, free some space, and check the disk",
    ),
}
"""By the name of SQLite's code, or its beginning: SQLITE_CORRUPT_INDEX is a SQLITE_CORRUPT."""

POSTGRES_FAILURES: dict[str, tuple[type[FalajError], str]] = {
    "53100": (Unavailable, DISK_FULL),
    "53200": (Unavailable, "PostgreSQL is out of memory; see its log, and give it more"),
    "53300": (Unavailable, "PostgreSQL has no connection left; raise its max_connections, or try again"),
    "57P": (Unavailable, "PostgreSQL is starting, stopping or recovering; try again"),
    "58": (Unavailable, "PostgreSQL reports an error of its disk or system; see its log"),
    "XX001": (Damaged, DAMAGED),
    "XX002": (Damaged, DAMAGED),
    "28": (Unavailable, "PostgreSQL refuses the user or the password in metadata.url; correct them"),
    "3D000": (Unavailable, "PostgreSQL has no database of the name in metadata.url; create it"),
    "42501": (Unavailable, "PostgreSQL gives the user in metadata.url too few rights; make it the owner"),
    "25006": (Unavailable, "PostgreSQL is read-only: metadata.url names a standby, or its disk was full"),
    "40": (Unavailable, "PostgreSQL ended this transaction in favour of another; try again"),
    "55": (Unavailable, "another transaction holds a lock for too long; try again"),
    "25P03": (Unavailable, "the transaction was idle for too long and was ended; try again"),
}
"""By SQLSTATE, or its beginning."""


REFUSALS = {
    'authentication failed|role ".*" does not exist|no pg_hba.conf entry': "28000",
    'database ".*" does not exist': "3D000",
    "too many clients|connection slots": "53300",
    "is starting up|is shutting down|in recovery": "57P03",
}
"""The SQLSTATE of a connection that PostgreSQL refused, by its words: libpq does not pass the state on."""


def _failure_of(cause: BaseException | None) -> FalajError | None:
    """Return what to tell about an error of a driver: which kind, and what to do; none for a wrong statement."""
    is_postgres = type(cause).__module__.startswith("psycopg")
    state = str(getattr(cause, "sqlstate" if is_postgres else "sqlite_errorname", None) or "")
    if is_postgres and not state:
        state = next((code for words, code in REFUSALS.items() if re.search(words, str(cause))), "")
    for code, (kind, words) in (POSTGRES_FAILURES if is_postgres else SQLITE_FAILURES).items():
        if state.startswith(code):
            return kind(words)
    if type(cause).__name__ == "DatabaseError":
        return Damaged(DAMAGED)
    if not _is_driver_error(cause, "OperationalError"):
        return None
    if is_postgres and not state:
        return Unavailable("PostgreSQL does not answer at metadata.url; see the log, and check that it runs")
    return Unavailable("the metadata database is unavailable; see the log")


def _is_bad_value(cause: BaseException | None) -> bool:
    """Return whether a row breaks a rule by itself (not null, check): trying again would never help."""
    name = getattr(cause, "sqlite_errorname", None) or getattr(cause, "sqlstate", None)
    return name in ("SQLITE_CONSTRAINT_NOTNULL", "SQLITE_CONSTRAINT_CHECK", "23502", "23514")


def _is_driver_error(error: BaseException | None, name: str) -> bool:
    """Return whether a driver raised an error of class `name`; both drivers use the same names."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] in ("sqlite3", "psycopg")
        for kind in type(error).__mro__
    )
