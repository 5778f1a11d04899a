"""Arrow tables: parse, cast to types, number and stream rows.

Other modules import this one inside functions, because pyarrow is slow to load and few commands need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.ipc as ipc
import pyarrow.parquet as parquet

from falaj.errors import Fault, InvalidInput, shorten
from falaj.governance.operations.operation import ArrowStream
from falaj.ports.online import ArrowBatch
from falaj.ports.queries import ArrowInput, ArrowTable
from falaj.ports.tables import ArrowDataset
from falaj.records.features import ColumnType, Feature

TYPES = {
    ColumnType.INTEGER: pa.int64(),
    ColumnType.FLOAT: pa.float64(),
    ColumnType.BOOLEAN: pa.bool_(),
    ColumnType.TEXT: pa.string(),
    ColumnType.MOMENT: pa.timestamp("us", "UTC"),
}

IN_MEMORY_BYTES = 512 << 20
TEXT_BYTES = 64
"""Assumed size of a text value; only reading it would tell."""
ZONE = r"(Z|[+-]\d\d:?\d\d)$"
"""The time zone at the end of a timestamp; one without it is in UTC."""
SHOWN_ROWS = 3
"""Bad rows that an error names."""


def parse(data: bytes, *, name: str, texts: frozenset[str] = frozenset()) -> ArrowTable:
    """Parse `data` as Parquet, Arrow or else CSV, where the columns in `texts` are read as text."""
    buffer = pa.BufferReader(data)
    try:
        if data[:4] == b"PAR1":
            return parquet.read_table(buffer)
        if data[:6] == b"ARROW1":
            return ipc.open_file(buffer).read_all()
        if data[:4] == b"\xff\xff\xff\xff":
            return ipc.open_stream(buffer).read_all()
        types = dict.fromkeys(texts, pa.string())
        return csv.read_csv(buffer, convert_options=csv.ConvertOptions(column_types=types))
    except (pa.ArrowException, OSError) as error:
        raise InvalidInput.at(
            f"blob {name}", given=str(error).partition("\n")[0], allowed="rows as Parquet, CSV or Arrow"
        ) from None


def conform(
    rows: ArrowTable, columns: tuple[Feature, ...], *, required: frozenset[str], where: str
) -> ArrowTable:
    """Return `columns` of `rows` cast to their types. Raise InvalidInput with all faults; `required` allow no nulls."""
    faults: list[Fault] = []
    found = {}
    for column in columns:
        if rows.column_names.count(column.name) != 1:
            given = shorten(f"columns {', '.join(rows.column_names)}", limit=400)
            faults.append(
                Fault(where=f"{where}.{column.name}", given=given, allowed="one column of this name")
            )
            continue
        values = _cast(rows[column.name], column, where, faults)
        if values is not None and column.name in required and values.null_count:
            empty = pc.indices_nonzero(pc.is_null(values))
            nulls = f"{values.null_count} without a value: {_row_numbers(empty[:SHOWN_ROWS].to_pylist(), len(empty))}"
            faults.append(Fault(where=f"{where}.{column.name}", given=nulls, allowed="a value in every row"))
        found[column.name] = values
    if faults:
        raise InvalidInput(
            f"{where}: {len(faults)} column{'s do' if len(faults) > 1 else ' does'} not fit", faults=faults
        )
    return pa.table(found)


def with_row_numbers(rows: ArrowTable, column: str, *, start: int = 0) -> ArrowTable:
    """Return `rows` with a column of row numbers that begins at `start`."""
    return rows.append_column(column, pa.arange(start, start + rows.num_rows))


def in_memory_if_small(dataset: ArrowDataset) -> ArrowInput:
    """Load `dataset` into memory if it is small: a join reads it three times, and decoding dominates the cost."""
    widths = [TEXT_BYTES if pa.types.is_string(kind) else 8 for kind in dataset.schema.types]
    return _whole(dataset) if dataset.count_rows() * sum(widths) <= IN_MEMORY_BYTES else dataset


def stream_batches(dataset: ArrowDataset) -> ArrowStream:
    """Stream the batches of a dataset in storage order."""
    scanner = dataset.scanner(use_threads=False)

    def batches() -> Iterator[Any]:
        yield from scanner.to_batches()

    reader: ArrowStream = pa.RecordBatchReader.from_batches(scanner.projected_schema, batches())
    return reader


def online_batch(keys: Sequence[bytes], events: Sequence[int], values: Sequence[bytes]) -> ArrowBatch:
    """Return a batch of rows for an online store."""
    return pa.record_batch(
        {
            "key": pa.array(keys, pa.binary()),
            "event_time": pa.array(events, pa.int64()),
            "value": pa.array(values, pa.binary()),
        }
    )


def _whole(dataset: ArrowDataset) -> ArrowTable:
    """Read file by file: the dataset's scanner takes three times as long with fresh memory (measured)."""
    files = [parquet.ParquetFile(fragment.open()).read() for fragment in dataset.get_fragments()]
    return pa.concat_tables(files).cast(dataset.schema) if files else dataset.to_table()


def _cast(values: Any, column: Feature, where: str, faults: list[Fault]) -> Any:
    """Cast `values` to the type of `column`; on failure return None and add a fault with the first bad rows."""
    try:
        return _converted(values, column.type)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
        given = f"{values.type}, which cannot be cast to {_type_name(column.type)}"
    except pa.ArrowInvalid:
        bad = _bad_rows(values, column.type, 0, SHOWN_ROWS + 1)
        shown = ", ".join(shorten(values[number].as_py(), limit=30) for number in bad[:SHOWN_ROWS])
        given = f"{values.type}: {shown} in {_row_numbers(bad[:SHOWN_ROWS], len(bad))}"
    faults.append(Fault(where=f"{where}.{column.name}", given=given, allowed=_type_name(column.type)))
    return None


def _converted(values: Any, kind: ColumnType) -> Any:
    if kind is ColumnType.MOMENT and pa.types.is_timestamp(values.type):
        values = values if values.type.tz else pc.assume_timezone(values, "UTC")
        return values.cast(TYPES[kind], safe=False)  # truncates to microseconds
    if kind is ColumnType.MOMENT and pa.types.is_string(values.type):
        zoned = pc.match_substring_regex(values, ZONE)
        values = pc.if_else(zoned, values, pc.binary_join_element_wise(values, "Z", ""))
    elif (
        kind is ColumnType.MOMENT and pa.types.is_primitive(values.type) and not pa.types.is_date(values.type)
    ):
        raise pa.ArrowTypeError(f"{values.type} is not a timestamp")
    found = values.cast(TYPES[kind])
    if kind is ColumnType.FLOAT:  # pandas writes nulls as NaN
        found = pc.if_else(pc.is_nan(found), None, found)
    return found


def _bad_rows(values: Any, kind: ColumnType, start: int, limit: int) -> list[int]:
    """Find the first `limit` rows that cannot be cast, by bisection."""
    try:
        _converted(values, kind)
    except pa.ArrowInvalid:
        if len(values) == 1:
            return [start]
        half = len(values) // 2
        found = _bad_rows(values[:half], kind, start, limit)
        if len(found) < limit:
            found += _bad_rows(values[half:], kind, start + half, limit - len(found))
        return found
    return []


def _row_numbers(first: list[int], count: int) -> str:
    """Format row numbers counted from 1, not counting the header of a CSV."""
    numbers = ", ".join(str(number + 1) for number in first)
    return f"row{'s' if len(first) > 1 else ''} {numbers}" + (" and more" if count > len(first) else "")


def _type_name(kind: ColumnType) -> str:
    return "a timestamp like 2024-06-01T08:00:00Z" if kind is ColumnType.MOMENT else str(kind)
