"""Queries on DuckDB, isolated from everything but their inputs."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import duckdb

from falaj.errors import InvalidInput, TooLarge
from falaj.ports.queries import ArrowInput, ArrowTable

MEMORY_MIB = 2048
TIMEOUT_S = 600.0

LOCKDOWN = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",  # otherwise SQL could read Python variables
}


class DuckDbQueryEngine:
    """A QueryEngine. Every statement runs in an in-memory database of its own.

    Data beyond `memory_mib` is spilled to a private folder below `spill`; without one the query fails.
    """

    def __init__(
        self,
        *,
        spill: Path | None = None,
        memory_mib: int = MEMORY_MIB,
        threads: int | None = None,
        limit_s: float = TIMEOUT_S,
    ) -> None:
        self._spill = spill
        self._memory_mib = memory_mib
        self._threads = threads or os.cpu_count() or 1
        self._limit_s = limit_s

    def select(self, sql: str, inputs: Mapping[str, ArrowInput]) -> ArrowTable:
        with self._folder() as folder, self._database(folder) as database:
            for name, rows in inputs.items():
                database.register(name, rows)
            database.execute("SET lock_configuration = true")
            try:
                _require_one_select(database, sql)
                with _interrupted_after(database, self._limit_s):
                    return database.sql(sql).to_arrow_table()
            except duckdb.Error as error:
                raise _translate_error(error, inputs, limit_s=self._limit_s) from None

    @contextmanager
    def _folder(self) -> Iterator[str]:
        """Create the spill folder of one statement. DuckDB lets SQL read it, so that it is never shared."""
        if self._spill is None:
            yield ""
            return
        self._spill.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._spill) as folder:
            yield folder

    @contextmanager
    def _database(self, folder: str) -> Iterator[duckdb.DuckDBPyConnection]:
        bounds = {
            "memory_limit": f"{self._memory_mib}MiB",
            "threads": str(self._threads),
            "temp_directory": folder,
        }
        with duckdb.connect(":memory:", config={**LOCKDOWN, **bounds}) as database:
            database.execute("SET TimeZone = 'UTC'")
            yield database


def _require_one_select(database: duckdb.DuckDBPyConnection, sql: str) -> None:
    kinds = [statement.type for statement in database.extract_statements(sql)]
    if kinds != [duckdb.StatementType.SELECT]:
        raise InvalidInput.at("sql", given=sql, allowed="one SELECT statement")


@contextmanager
def _interrupted_after(database: duckdb.DuckDBPyConnection, limit_s: float) -> Iterator[None]:
    timer = threading.Timer(limit_s, database.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _translate_error(
    error: duckdb.Error, inputs: Mapping[str, ArrowInput], *, limit_s: float
) -> InvalidInput:
    if isinstance(error, duckdb.OutOfMemoryException):
        return TooLarge("the query exceeds its memory limit; read fewer rows or columns")
    if isinstance(error, duckdb.InterruptException):
        return InvalidInput(f"the query exceeded its time limit of {limit_s:g} s")
    if isinstance(error, duckdb.PermissionException):
        allowed = f"a query over {', '.join(sorted(inputs)) or 'no input'} and nothing else"
        return InvalidInput.at("sql", given=_first_line(error), allowed=allowed)
    return InvalidInput.at("sql", given=_first_line(error), allowed="a query that DuckDB can run")


def _first_line(error: duckdb.Error) -> str:
    return str(error).strip().partition("\n")[0]
