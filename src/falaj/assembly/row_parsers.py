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
from falaj.features.validation import quarantined_rows
from falaj.features.validation.checks import ROW, CheckedRows, RowRules, check_rows, conform
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
    conform(table, columns, required=frozenset({"at"}), where="warm-up")


def parse_view_rows(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """The rows of a file after the view's `sql`, if there is one, in its columns and checked by its `rules`.

    The fact `notes` says what was assumed about them. If `strict`, that is refused. The other options are those of
    `row_files.read_rows`. If rules were broken, the fact `broken` says so, and from the byte `invalid_from` on the
    content is a second stream: the invalid rows as they came.
    """
    rows = row_files.read_rows(sources, options)
    if options["sql"] is not None:
        budget = MemoryBudget(2 * options["limit_bytes"])
        queries = DuckDbQueryEngine(budget=budget, threads=min(THREADS, os.cpu_count() or 1))
        rows = queries.select(options["sql"], {"source": rows})
    rules = RowRules.model_validate(options["rules"])
    found = check_rows(rows, rules, where=options["where"])
    assumed = arrow_tables.assumptions_of(rows, rules.columns)
    if assumed and options["strict"]:
        raise _refused(assumed, options["where"])
    notes = [str(each) for each in assumed[:MAX_NOTES]]
    if left := len(assumed) - len(notes):
        notes.append(f"{left} more columns that the view does not have, left out")
    return _parsed(found, notes)


def parse_quarantined_rows(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """The rows of a quarantined batch, checked by the `rules` of the view as they are now; as of `parse_view_rows`."""
    batch = row_files.read_rows(sources, options)
    rules = RowRules.model_validate(options["rules"])
    rows = quarantined_rows.in_columns(batch, rules.columns)
    return _parsed(
        check_rows(
            rows,
            rules,
            where=options["where"],
            numbers=batch[ROW],
            repeated=quarantined_rows.repeated(batch),
        ),
        [],
    )


def _parsed(found: CheckedRows, notes: Sequence[str]) -> Parsed:
    content = arrow_ipc.write_table(found.rows)
    if found.invalid is None:
        return Parsed(facts={"notes": notes}, content=content)
    facts = {
        "notes": notes,
        "broken": [each.model_dump(mode="json") for each in found.broken],
        "invalid_from": len(content),
    }
    return Parsed(facts=facts, content=b"".join([content, arrow_ipc.write_table(found.invalid)]))


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
