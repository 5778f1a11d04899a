"""Rows as Arrow: parsed, fitted to their types, numbered and streamed.

The other modules of the room import this one where they use it: pyarrow is slow to load, and few commands need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.ipc as ipc
import pyarrow.parquet as parquet

from falaj.errors import Fault, InvalidInput
from falaj.governance.operations import ArrowStream
from falaj.ports.online import ArrowBatch
from falaj.ports.queries import ArrowTable
from falaj.ports.tables import ArrowDataset
from falaj.records.features import ColumnType, Feature

TYPES = {
    ColumnType.INTEGER: pa.int64(),
    ColumnType.FLOAT: pa.float64(),
    ColumnType.BOOLEAN: pa.bool_(),
    ColumnType.TEXT: pa.string(),
    ColumnType.MOMENT: pa.timestamp("us", "UTC"),
}


def parse(data: bytes, *, name: str) -> ArrowTable:
    """`data` as rows; anything that is neither Parquet nor Arrow is read as CSV."""
    buffer = pa.BufferReader(data)
    try:
        if data[:4] == b"PAR1":
            return parquet.read_table(buffer)
        if data[:6] == b"ARROW1":
            return ipc.open_file(buffer).read_all()
        if data[:4] == b"\xff\xff\xff\xff":
            return ipc.open_stream(buffer).read_all()
        return csv.read_csv(buffer)
    except (pa.ArrowException, OSError) as error:
        raise InvalidInput.at(
            f"blob {name}", given=str(error).partition("\n")[0], allowed="rows as Parquet, CSV or Arrow"
        ) from None


def conform(
    rows: ArrowTable, columns: tuple[Feature, ...], *, required: frozenset[str], where: str
) -> ArrowTable:
    """`rows` with `columns` only, in their types; all that does not fit at once. `required` ones have no nulls."""
    faults: list[Fault] = []
    found = {}
    for column in columns:
        if column.name not in rows.column_names:
            given = ", ".join(rows.column_names)
            faults.append(
                Fault(where=f"{where}.{column.name}", given=f"columns {given}", allowed="this column")
            )
            continue
        values = _cast(rows[column.name], column, where, faults)
        if values is not None and column.name in required and values.null_count:
            nulls = f"{values.null_count} rows without a value"
            faults.append(Fault(where=f"{where}.{column.name}", given=nulls, allowed="a value in every row"))
        found[column.name] = values
    if faults:
        raise InvalidInput(f"{where}: {len(faults)} column(s) do not fit", faults=faults)
    return pa.table(found)


def numbered(rows: ArrowTable, column: str, *, start: int = 0) -> ArrowTable:
    """`rows` with their numbers, from `start` on."""
    return rows.append_column(column, pa.arange(start, start + rows.num_rows))


def streamed(dataset: ArrowDataset) -> ArrowStream:
    """A dataset as batches, in the order in which they lie."""
    scanner = dataset.scanner(use_threads=False)

    def batches() -> Iterator[Any]:
        yield from scanner.to_batches()

    reader: ArrowStream = pa.RecordBatchReader.from_batches(scanner.projected_schema, batches())
    return reader


def online_batch(keys: Sequence[bytes], events: Sequence[int], values: Sequence[bytes]) -> ArrowBatch:
    """Rows for an online store."""
    return pa.record_batch(
        {
            "key": pa.array(keys, pa.binary()),
            "event_time": pa.array(events, pa.int64()),
            "value": pa.array(values, pa.binary()),
        }
    )


def _cast(values: Any, column: Feature, where: str, faults: list[Fault]) -> Any:
    wanted = TYPES[column.type]
    try:
        if column.type is ColumnType.MOMENT and pa.types.is_timestamp(values.type):
            values = values if values.type.tz else pc.assume_timezone(values, "UTC")
            return values.cast(wanted, safe=False)  # finer than microseconds is cut off
        if column.type is ColumnType.MOMENT and not pa.types.is_date(values.type):
            raise pa.ArrowInvalid(f"{values.type} is not a moment")
        return values.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        given = f"{values.type}: {str(error).partition(chr(10))[0]}"
        faults.append(Fault(where=f"{where}.{column.name}", given=given, allowed=f"{column.type}"))
        return None
