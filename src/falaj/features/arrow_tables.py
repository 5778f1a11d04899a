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

HELD_BYTES = 512 << 20
TEXT_BYTES = 64
"""What a text is assumed to take, because only reading it would tell."""
ZONE = r"(Z|[+-]\d\d:?\d\d)$"
"""How a moment that is written ends, if it says where it was; else it is one in UTC."""
FEW = 3
"""How many bad rows an error names."""


def parse(data: bytes, *, name: str, texts: frozenset[str] = frozenset()) -> ArrowTable:
    """`data` as rows; anything that is neither Parquet nor Arrow is read as CSV, where `texts` stay text."""
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
    """`rows` with `columns` only, in their types; all that does not fit at once. `required` ones have no nulls."""
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
            nulls = (
                f"{values.null_count} without a value: {_row_numbers(empty[:FEW].to_pylist(), len(empty))}"
            )
            faults.append(Fault(where=f"{where}.{column.name}", given=nulls, allowed="a value in every row"))
        found[column.name] = values
    if faults:
        raise InvalidInput(
            f"{where}: {len(faults)} column{'s do' if len(faults) > 1 else ' does'} not fit", faults=faults
        )
    return pa.table(found)


def with_row_numbers(rows: ArrowTable, column: str, *, start: int = 0) -> ArrowTable:
    """`rows` with their numbers, from `start` on."""
    return rows.append_column(column, pa.arange(start, start + rows.num_rows))


def in_memory_if_small(dataset: ArrowDataset) -> ArrowInput:
    """`dataset` in memory if it is small enough: a join reads its rows three times, and decoding them costs most."""
    widths = [TEXT_BYTES if pa.types.is_string(kind) else 8 for kind in dataset.schema.types]
    return _whole(dataset) if dataset.count_rows() * sum(widths) <= HELD_BYTES else dataset


def stream_batches(dataset: ArrowDataset) -> ArrowStream:
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


def _whole(dataset: ArrowDataset) -> ArrowTable:
    """File by file, because the scanner of a dataset takes three times as long where memory is new."""
    files = [parquet.ParquetFile(fragment.open()).read() for fragment in dataset.get_fragments()]
    return pa.concat_tables(files).cast(dataset.schema) if files else dataset.to_table()


def _cast(values: Any, column: Feature, where: str, faults: list[Fault]) -> Any:
    """`values` in the type of `column`; none, and a fault that names the first bad rows, if they do not fit."""
    try:
        return _converted(values, column.type)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
        given = f"{values.type}, which is never {_said(column.type)}"
    except pa.ArrowInvalid:
        bad = _bad_rows(values, column.type, 0, FEW + 1)
        shown = ", ".join(shorten(values[number].as_py(), limit=30) for number in bad[:FEW])
        given = f"{values.type}: {shown} in {_row_numbers(bad[:FEW], len(bad))}"
    faults.append(Fault(where=f"{where}.{column.name}", given=given, allowed=_said(column.type)))
    return None


def _converted(values: Any, kind: ColumnType) -> Any:
    if kind is ColumnType.MOMENT and pa.types.is_timestamp(values.type):
        values = values if values.type.tz else pc.assume_timezone(values, "UTC")
        return values.cast(TYPES[kind], safe=False)  # finer than microseconds is cut off
    if kind is ColumnType.MOMENT and pa.types.is_string(values.type):
        zoned = pc.match_substring_regex(values, ZONE)
        values = pc.if_else(zoned, values, pc.binary_join_element_wise(values, "Z", ""))
    elif (
        kind is ColumnType.MOMENT and pa.types.is_primitive(values.type) and not pa.types.is_date(values.type)
    ):
        raise pa.ArrowTypeError(f"{values.type} is not a moment")
    found = values.cast(TYPES[kind])
    if kind is ColumnType.FLOAT:  # what is not a number is not there: pandas writes it so
        found = pc.if_else(pc.is_nan(found), None, found)
    return found


def _bad_rows(values: Any, kind: ColumnType, start: int, limit: int) -> list[int]:
    """The numbers of the first `limit` rows that do not fit, found by halving."""
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
    """Rows as people count them: from 1, without the heading of a CSV."""
    numbers = ", ".join(str(number + 1) for number in first)
    return f"row{'s' if len(first) > 1 else ''} {numbers}" + (" and more" if count > len(first) else "")


def _said(kind: ColumnType) -> str:
    return "a moment, like 2024-06-01T08:00:00Z" if kind is ColumnType.MOMENT else str(kind)
