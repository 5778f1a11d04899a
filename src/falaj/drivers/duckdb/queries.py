"""Queries on DuckDB, isolated from everything but their inputs."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pyarrow as pa

from falaj.errors import InvalidInput, TooLarge
from falaj.ports.machine.memory import MemoryBudget, MemoryLease
from falaj.ports.queries import ArrowInput, ArrowTable
from falaj.records.names import repeated_names

STATEMENT_BYTES = 2 << 30
"""Most memory of one statement, beside its result; a quarter of the budget where that is less."""
BUDGET_BYTES = 8 << 30
TIMEOUT_S = 600.0
INTERRUPT_EVERY_S = 0.05
BATCH_ROWS = 1 << 16

LIVING = 6
"""A folder of that many time limits belongs to no running statement."""

LOCKDOWN = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",  # otherwise SQL could read Python variables
    "max_expression_depth": "250",  # a quarter of the default: the parser and the binder recurse
}


class DuckDbQueryEngine:
    """A QueryEngine. Every statement runs in an in-memory database of its own.

    All statements share `budget`. What one needs beyond its part is spilled to a private folder below `spill`, which
    takes at most half of the free disk; without such a folder the query fails.
    """

    def __init__(
        self,
        *,
        spill: Path | None = None,
        budget: MemoryBudget | None = None,
        threads: int | None = None,
        limit_s: float = TIMEOUT_S,
    ) -> None:
        self._spill = spill
        self._budget = budget or MemoryBudget(BUDGET_BYTES)
        self._statement_bytes = min(STATEMENT_BYTES, self._budget.total_bytes // 4)
        self._threads = threads or os.cpu_count() or 1
        self._limit_s = limit_s
        self.delete_spilled(before=datetime.now(UTC))

    def select(
        self, sql: str, inputs: Mapping[str, ArrowInput], *, memory: MemoryLease | None = None
    ) -> ArrowTable:
        with (
            self._budget.lease() if memory is None else nullcontext(memory) as lease,
            lease.borrowed(self._statement_bytes),
            self._folder() as folder,
            self._database(folder) as database,
        ):
            try:
                for name, rows in inputs.items():
                    _require_distinct(name, rows.schema.names)
                    database.register(name, rows)
                database.execute("SET lock_configuration = true")
                with _interrupted_after(database, self._limit_s) as is_late:
                    _require_one_select(database, sql)
                    if is_late():  # nothing interrupts the parser
                        raise duckdb.InterruptException("parsing took too long")
                    return _result(database, sql, lease)
            except duckdb.Error as error:
                raise _translate_error(error, inputs, limit_s=self._limit_s) from None

    def delete_spilled(self, *, before: datetime) -> int:
        if self._spill is None or not self._spill.is_dir():
            return 0
        latest = min(before.timestamp(), time.time() - LIVING * self._limit_s)
        left = [folder for folder in self._spill.iterdir() if _changed_at(folder) < latest]
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        return len(left)

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
            "memory_limit": f"{self._statement_bytes}B",
            "threads": str(self._threads),
            "temp_directory": folder,
        }
        if folder:
            bounds["max_temp_directory_size"] = f"{shutil.disk_usage(folder).free // 2}B"
        with duckdb.connect(":memory:", config={**LOCKDOWN, **bounds}) as database:
            database.execute("SET TimeZone = 'UTC'")
            yield database


def _changed_at(folder: Path) -> float:
    """Return when something was last written to `folder`; now, if it is just being removed."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except FileNotFoundError:
        return time.time()


def _require_distinct(name: str, columns: Sequence[str]) -> None:
    """DuckDB would rename all but the first of the same name, and a query would read one column for another."""
    if same := repeated_names(columns):
        allowed = "columns whose names differ by more than case, which SQL ignores"
        raise InvalidInput.at(name, given=", ".join(same), allowed=allowed)


def _require_one_select(database: duckdb.DuckDBPyConnection, sql: str) -> None:
    kinds = [statement.type for statement in database.extract_statements(sql)]
    if kinds != [duckdb.StatementType.SELECT]:
        raise InvalidInput.at("sql", given=sql, allowed="one SELECT statement")


def _result(database: duckdb.DuckDBPyConnection, sql: str, lease: MemoryLease) -> ArrowTable:
    """Collect the result as it is computed: DuckDB does not count it towards its own limit."""
    reader, batches = database.sql(sql).to_arrow_reader(BATCH_ROWS), []
    for batch in reader:
        lease.grow(batch.nbytes)
        batches.append(batch)
    return pa.Table.from_batches(batches, reader.schema)


@contextmanager
def _interrupted_after(database: duckdb.DuckDBPyConnection, limit_s: float) -> Iterator[Callable[[], bool]]:
    """Interrupt what runs after `limit_s`, repeatedly: DuckDB forgets it while it parses. Yield whether it is late."""
    ended, late = threading.Event(), threading.Event()

    def interrupt() -> None:
        late.set()
        while not ended.wait(INTERRUPT_EVERY_S):
            database.interrupt()

    timer = threading.Timer(limit_s, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield late.is_set
    finally:
        timer.cancel()
        ended.set()
        if late.is_set():
            timer.join()  # the database is closed next


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
