"""The parser of rows for a view: its file, its SQL and its types. This code runs in the parser process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from falaj.drivers.duckdb.queries import DuckDbQueryEngine
from falaj.errors import Fault, InvalidInput
from falaj.features import arrow_tables, row_files
from falaj.governance import arrow_ipc
from falaj.ports.machine.memory import MemoryBudget
from falaj.ports.parsers import ByteSource, Parsed
from falaj.records.features import ColumnType, Feature

THREADS = 2
MAX_NOTES = 20


def warm_up() -> None:
    """Let pyarrow set itself up, which takes it 0.2 s, before the parser process forks. No threads: they would not be
    in the children."""
    moment = datetime(2024, 6, 1, tzinfo=UTC)
    table = pa.table(
        {"n": pa.array([1.0, None]), "t": pa.array(["x", None]), "at": pa.array([moment, moment])}
    )
    columns = (
        Feature(name="n", type=ColumnType.FLOAT),
        Feature(name="t", type=ColumnType.TEXT),
        Feature(name="at", type=ColumnType.MOMENT),
    )
    arrow_tables.conform(table, columns, required=frozenset({"at"}), where="warm-up")


def parse_view_rows(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """The rows of a file after the view's `sql`, if there is one, as its `columns`; `required` ones have no nulls.

    The fact `notes` says what was assumed about them. If `strict`, that is refused. The other options are those of
    `row_files.read_rows`.
    """
    rows = row_files.read_rows(sources, options)
    if options["sql"] is not None:
        budget = MemoryBudget(2 * options["limit_bytes"])
        queries = DuckDbQueryEngine(budget=budget, threads=min(THREADS, os.cpu_count() or 1))
        rows = queries.select(options["sql"], {"source": rows})
    columns = tuple(Feature.model_validate(column) for column in options["columns"])
    found = arrow_tables.conform(
        rows, columns, required=frozenset(options["required"]), where=options["where"]
    )
    assumed = arrow_tables.assumptions_of(rows, columns)
    if assumed and options["strict"]:
        raise _refused(assumed, options["where"])
    notes = [str(each) for each in assumed[:MAX_NOTES]]
    if left := len(assumed) - len(notes):
        notes.append(f"{left} more columns that the view does not have, left out")
    return Parsed(facts={"notes": notes}, content=arrow_ipc.write_table(found))


def _refused(assumed: list[arrow_tables.Assumption], where: str) -> InvalidInput:
    faults = [
        Fault(
            where=f"{where}.{each.column}",
            given=each.found,
            allowed=each.allowed,
            fix=f"correct the rows, or ingest them without strict: they are {each.read_as} then",
        )
        for each in assumed
    ]
    return InvalidInput(
        f"{where}: the rows do not say how they are to be read, and strict is on", faults=faults
    )
