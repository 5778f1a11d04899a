"""Copies of a database at one moment, made while others write: SQLite as a file, PostgreSQL as one file per table."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from falaj.drivers.sql.database import SqlTransaction, sqlite_engine, translate_errors
from falaj.drivers.sql.migrate import current_version, migrate
from falaj.errors import Conflict, Damaged
from falaj.ports.metadata import Transaction

T = TypeVar("T")

FILE = "falaj.db"
PAGES = 4096
"""Pages that are copied before progress is reported."""
TABLES = "tables.json"
"""The names and columns of the copied tables, in the order in which foreign keys allow to fill them."""

Progress = Callable[[int], None]


def take_snapshot(
    url: str,
    folder: Path,
    ask: Callable[[Transaction], T],
    *,
    schemas: tuple[str, ...] = (),
    progress: Progress = lambda _bytes: None,
) -> T:
    """Copy the database into `folder`; return what `ask` reads at the same moment.

    `schemas` are further schemas of a PostgreSQL database that are copied with the public one.
    """
    if url.startswith("sqlite"):
        return _copy_file(url, folder / FILE, ask, progress)
    return _copy_tables(url, folder, ask, (None, *schemas), progress)


def load_snapshot(
    url: str, folder: Path, *, schema_version: str, prepare: Callable[[], None], progress: Progress
) -> None:
    """Fill the PostgreSQL database at `url` from `folder`, in one transaction. Raise Conflict if it is not empty.

    `prepare` creates the tables of further schemas.
    """
    engine = sa.create_engine(url)
    try:
        with translate_errors():
            if current_version(engine) is not None:
                raise Conflict(
                    f"the database {engine.url.render_as_string()} is not empty; restore into an empty one"
                )
        migrate(url, to=schema_version)
        prepare()
        with translate_errors(), engine.begin() as connection:
            for table in _listed(folder):
                _fill(connection, folder, table, progress)
    finally:
        engine.dispose()


def schemas_in(folder: Path) -> set[str]:
    """Return the further schemas of a copy."""
    return {table["schema"] for table in _listed(folder) if table["schema"]}


def _copy_file(url: str, target: Path, ask: Callable[[Transaction], T], progress: Progress) -> T:
    engine = sqlite_engine(url, begin="BEGIN")
    try:
        with translate_errors(), engine.connect() as connection, connection.begin():
            # The first read fixes what this transaction sees; the copy is made inside it.
            found = ask(SqlTransaction(connection, percent=False))
            source: Any = connection.connection.driver_connection
            with _closing(sqlite3.connect(target)) as copy:
                size = int(source.execute("PRAGMA page_size").fetchone()[0])
                left = [0]

                def report(_status: int, remaining: int, total: int) -> None:
                    done = (total if not left[0] else left[0]) - remaining
                    left[0] = remaining
                    progress(done * size)

                source.backup(copy, pages=PAGES, progress=report)
        return found
    finally:
        engine.dispose()


@contextmanager
def _closing(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    try:
        yield connection
    finally:
        connection.close()


def _copy_tables(
    url: str,
    folder: Path,
    ask: Callable[[Transaction], T],
    schemas: tuple[str | None, ...],
    progress: Progress,
) -> T:
    engine = sa.create_engine(url, isolation_level="REPEATABLE READ")
    try:
        with translate_errors(), engine.connect() as connection, connection.begin():
            connection.execute(sa.text("SET TRANSACTION READ ONLY"))
            found = ask(SqlTransaction(connection, percent=True))
            tables = [table for schema in schemas for table in _tables(connection, schema)]
            for table in tables:
                _write_rows(connection, folder, table, progress)
            (folder / TABLES).write_text(json.dumps(tables))
        return found
    finally:
        engine.dispose()


def _tables(connection: sa.Connection, schema: str | None) -> list[dict[str, Any]]:
    """Return the tables of a schema, those first that others refer to. The two tables of versions are left out."""
    inspector = sa.inspect(connection)
    if schema is not None and not inspector.has_schema(schema):
        return []
    ordered = [name for name, _keys in inspector.get_sorted_table_and_fkc_names(schema=schema) if name]
    return [
        {
            "schema": schema,
            "name": name,
            "columns": [
                column["name"]
                for column in inspector.get_columns(name, schema=schema)
                if not _is_made(column)
            ],
        }
        for name in ordered
        if name not in ("alembic_version", "dbos_migrations")
    ]


def _is_made(column: Any) -> bool:
    """Tell whether the database computes the column."""
    return column.get("computed") is not None


def _write_rows(connection: sa.Connection, folder: Path, table: dict[str, Any], progress: Progress) -> None:
    raw: Any = connection.connection.driver_connection
    statement = f"COPY {_address(table)} ({_columns(table)}) TO STDOUT"
    with (folder / _file(table)).open("wb") as file, raw.cursor() as cursor, cursor.copy(statement) as copy:
        for data in copy:
            file.write(data)
            progress(len(data))


def _fill(connection: sa.Connection, folder: Path, table: dict[str, Any], progress: Progress) -> None:
    raw: Any = connection.connection.driver_connection
    connection.execute(sa.text(f"DELETE FROM {_address(table)}"))  # noqa: S608 - migrations may have added rows
    statement = f"COPY {_address(table)} ({_columns(table)}) FROM STDIN"
    with (folder / _file(table)).open("rb") as file, raw.cursor() as cursor, cursor.copy(statement) as copy:
        while data := file.read(1 << 20):
            copy.write(data)
            progress(len(data))
    for column in table["columns"]:
        _advance_sequence(connection, table, column)


def _advance_sequence(connection: sa.Connection, table: dict[str, Any], column: str) -> None:
    """Let a numbered column go on after its greatest value."""
    find = sa.text("SELECT pg_get_serial_sequence(:table, :column)")
    found = connection.execute(find, {"table": _address(table), "column": column}).scalar()
    if found is not None:
        column, address = f'max("{column}")', _address(table)
        newest = f"SELECT setval(:found, {column}) FROM {address} HAVING {column} > 0"  # noqa: S608
        connection.execute(sa.text(newest), {"found": found})


def _listed(folder: Path) -> list[dict[str, Any]]:
    try:
        tables: list[dict[str, Any]] = json.loads((folder / TABLES).read_text())
    except (OSError, ValueError) as error:
        raise Damaged(f"the copy of the database has no readable list of its tables: {error}") from None
    return tables


def _address(table: dict[str, Any]) -> str:
    return ".".join(f'"{part}"' for part in (table["schema"], table["name"]) if part)


def _columns(table: dict[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in table["columns"])


def _file(table: dict[str, Any]) -> str:
    return ".".join(part for part in (table["schema"], table["name"], "copy") if part)
