"""Arrow tables: cast to types, number and stream rows.

Other modules import this one inside functions, because pyarrow is slow to load and few commands need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet

from falaj.governance.operations.operation import ArrowStream
from falaj.ports.machine.memory import MemoryLease
from falaj.ports.metadata import to_micros
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
"""Largest view that a join keeps in memory."""
BATCH_ROWS = 1 << 17
TEXT_BYTES = 64
"""Assumed size of a text value; only reading it would tell."""
ZONE = r"(Z|[+-]\d\d:?\d\d)$"
"""The time zone at the end of a timestamp; one without it is in UTC."""
EARLIEST = to_micros(datetime.min.replace(tzinfo=UTC))
LATEST = to_micros(datetime.max.replace(tzinfo=UTC))
"""The moments that Python has, in microseconds since 1970: whatever is stored can be read."""


def in_stored_units(rows: ArrowTable) -> ArrowTable:
    """Return `rows` with times in microseconds and dates in days, as tables store them; nanoseconds are cut."""
    columns = [values.cast(_stored_unit(values.type), safe=False) for values in rows.columns]
    return pa.table(columns, names=rows.column_names)


def _stored_unit(kind: Any) -> Any:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.date32() if pa.types.is_date64(kind) else kind


def _is_ns(kind: Any) -> bool:
    """Tell whether values have nanoseconds, which are cut; `cut_nanoseconds` tells it."""
    return pa.types.is_timestamp(kind) and bool(kind.unit == "ns")


class Assumption(NamedTuple):
    """How values were read that do not say it themselves: what was found in a column, and what became of it."""

    column: str
    found: str
    read_as: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.column}: {self.found}, {self.read_as}"


def assumptions_of(rows: ArrowTable, columns: tuple[Feature, ...]) -> list[Assumption]:
    """Return what `row_checks` assumes when it reads `columns` of `rows`, and which other columns it leaves out."""
    names = {column.name for column in columns}
    return time_assumptions(rows, columns) + [
        Assumption(name, "not a column of the view", "left out", "the columns of the view and no others")
        for name in rows.column_names
        if name not in names
    ]


def time_assumptions(rows: ArrowTable, columns: tuple[Feature, ...]) -> list[Assumption]:
    """Return what `row_checks` assumes about the times in `columns` of `rows`."""
    found: list[Assumption] = []
    for column in columns:
        if column.type is ColumnType.MOMENT and rows.column_names.count(column.name) == 1:
            found += _zone_assumptions(column.name, rows[column.name])
            found += cut_nanoseconds(column.name, rows[column.name])
    return found


def _zone_assumptions(name: str, values: Any) -> Iterator[Assumption]:
    kind = values.type
    naive = 0
    if pa.types.is_date(kind) or (pa.types.is_timestamp(kind) and not kind.tz):
        naive = len(values) - values.null_count
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        naive = pc.sum(pc.invert(pc.match_substring_regex(values, ZONE))).as_py() or 0
    if naive:
        allowed = "timestamps with a time zone, such as 2024-06-01T08:00:00Z"
        yield Assumption(name, f"{_count(naive)} without a time zone", "read as UTC", allowed)


def cut_nanoseconds(name: str, values: Any) -> Iterator[Assumption]:
    """Yield how many timestamps of a column lose nanoseconds when they are stored, if any does."""
    kind = values.type
    if _is_ns(kind):
        exact = values.cast(pa.timestamp("us", kind.tz), safe=False).cast(kind)
        if cut := pc.sum(pc.not_equal(exact, values)).as_py():
            yield Assumption(
                name, f"{_count(cut)} with nanoseconds", "cut to microseconds", "whole microseconds"
            )


def _count(number: int) -> str:
    return f"{number} timestamp{'s' if number > 1 else ''}"


def schema_of(columns: tuple[Feature, ...]) -> Any:
    """Return the Arrow schema of `columns`, as `row_checks.conform` makes it."""
    return pa.schema([(column.name, TYPES[column.type]) for column in columns])


def fits(dataset: ArrowDataset, column: str, kind: ColumnType) -> bool:
    """Tell whether all values of a column can be cast to a type exactly."""
    try:
        for batch in dataset.scanner(columns=[column], use_threads=False).to_batches():
            batch.column(0).cast(TYPES[kind])
    except pa.ArrowInvalid:
        return False
    return True


def guess_type(values: Any) -> ColumnType | None:
    """Return the type of column that can store `values`; text that is times throughout is a moment. None: no type."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return ColumnType.BOOLEAN
    if pa.types.is_integer(kind):
        return ColumnType.INTEGER
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return ColumnType.FLOAT
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return ColumnType.MOMENT
    if not pa.types.is_string(kind) and not pa.types.is_large_string(kind):
        return None
    is_empty = values.null_count == len(values)
    return ColumnType.TEXT if is_empty or not _is_castable(values, ColumnType.MOMENT) else ColumnType.MOMENT


def _is_castable(values: Any, kind: ColumnType) -> bool:
    try:
        converted(values, kind)
    except pa.ArrowException:
        return False
    return True


def with_columns(dataset: ArrowDataset, columns: tuple[Feature, ...]) -> ArrowStream:
    """Stream the rows of a dataset in `columns`, null where it has none, and those of the platform ("__…") behind."""
    own = [field for field in dataset.schema if field.name.startswith("__")]
    schema = pa.schema([*schema_of(columns), *own])

    def batches() -> Iterator[Any]:
        for batch in dataset.scanner(use_threads=False).to_batches():
            yield pa.record_batch([_column(batch, field) for field in schema], schema=schema)

    reader: ArrowStream = pa.RecordBatchReader.from_batches(schema, batches())
    return reader


def _column(batch: Any, field: Any) -> Any:
    if field.name not in batch.schema.names:
        return pa.nulls(batch.num_rows, field.type)
    return batch.column(field.name).cast(field.type)


def with_row_numbers(rows: ArrowTable, column: str, *, start: int = 0) -> ArrowTable:
    """Return `rows` with a column of row numbers that begins at `start`."""
    return rows.append_column(column, pa.arange(start, start + rows.num_rows))


def with_moment(rows: ArrowTable, column: str, moment: datetime | None) -> ArrowTable:
    """Return `rows` with a column that has the same moment in every row."""
    return rows.append_column(column, pa.repeat(pa.scalar(moment, TYPES[ColumnType.MOMENT]), rows.num_rows))


def in_memory_if_small(dataset: ArrowDataset, *, memory: MemoryLease) -> ArrowInput:
    """Load `dataset` into memory if it is small: a join reads it three times, and decoding dominates the cost."""
    widths = [TEXT_BYTES if pa.types.is_string(kind) else 8 for kind in dataset.schema.types]
    limit_bytes = min(IN_MEMORY_BYTES, memory.spare_bytes // 2)
    if dataset.count_rows() * sum(widths) > limit_bytes:
        return dataset
    table = _whole(dataset, limit_bytes)
    if table is None:
        return dataset
    memory.grow(table.nbytes)
    return table


def stream_in_order(dataset: ArrowDataset, number: str, columns: Sequence[str]) -> ArrowStream:
    """Stream `columns` of a dataset in the order of its column `number`; without that column, in storage order.

    A table store may write the parts of a large table in any order.
    """
    schema = pa.schema([dataset.schema.field(name) for name in columns])
    batches = _ordered(dataset, number) if number in dataset.schema.names else _stored(dataset)
    shown = (batch.select(schema.names).cast(schema) for batch in batches)
    reader: ArrowStream = pa.RecordBatchReader.from_batches(schema, shown)
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


def _stored(dataset: ArrowDataset) -> Iterator[Any]:
    yield from dataset.scanner(use_threads=False).to_batches()


def _ordered(dataset: ArrowDataset, number: str) -> Iterator[Any]:
    """Yield batches by `number`. A row is held back until no row group that is still unread has a lower one."""
    groups = sorted(_row_groups(dataset, number), key=lambda group: group[0])
    bounds = [lowest for lowest, _, _ in groups[1:]]
    held: ArrowTable | None = None
    for (_, fragment, position), bound in zip_longest(groups, bounds):
        read = parquet.ParquetFile(fragment.open()).read_row_group(position, use_threads=False)
        held = _sorted(read if held is None else pa.concat_tables([held, read]), number)
        ready = held.num_rows if bound is None else pc.sum(pc.less(held[number], bound)).as_py()
        yield from held[:ready].to_batches(max_chunksize=BATCH_ROWS)
        held = held[ready:] if ready < held.num_rows else None


def _row_groups(dataset: ArrowDataset, number: str) -> Iterator[tuple[int, Any, int]]:
    """Yield the row groups of all files: their lowest number, the fragment of their file and their position in it."""
    for fragment in dataset.get_fragments():
        file = parquet.ParquetFile(fragment.open())
        for position in range(file.num_row_groups):
            lowest = pc.min(file.read_row_group(position, columns=[number])[number]).as_py()
            if lowest is not None:  # else it has no rows
                yield lowest, fragment, position


def _sorted(rows: ArrowTable, number: str) -> ArrowTable:
    order = pc.sort_indices(rows[number])
    return rows if order.equals(pa.arange(0, len(order)).cast(order.type)) else rows.take(order)


def _whole(dataset: ArrowDataset, limit_bytes: int) -> ArrowTable | None:
    """Read file by file: the dataset's scanner takes three times as long with fresh memory (measured).

    Return None if the rows take more than `limit_bytes`: text can be longer than was assumed.
    """
    files, taken = [], 0
    for fragment in dataset.get_fragments():
        for batch in parquet.ParquetFile(fragment.open(), pre_buffer=False).iter_batches(
            batch_size=BATCH_ROWS
        ):
            taken += batch.nbytes
            if taken > limit_bytes:
                return None
            files.append(pa.Table.from_batches([batch]))
    return pa.concat_tables(files).cast(dataset.schema) if files else dataset.to_table()


def converted(values: Any, kind: ColumnType) -> Any:
    """Return `values` in the type of a column; NaN is null. Raise ArrowException if that cannot be."""
    if pa.types.is_floating(values.type):  # pandas writes nulls as NaN; as a text it would be a key, "nan"
        values = pc.if_else(pc.is_nan(values), None, values)
    if pa.types.is_large_string(values.type):  # polars and pandas write text so
        values = values.cast(pa.string())
    if kind is ColumnType.MOMENT and pa.types.is_timestamp(values.type):
        values = values if values.type.tz else pc.assume_timezone(values, "UTC")
        return _readable(values.cast(TYPES[kind], safe=not _is_ns(values.type)))  # coarser units may overflow
    if kind is ColumnType.MOMENT and pa.types.is_string(values.type):
        zoned = pc.match_substring_regex(values, ZONE)
        values = pc.if_else(zoned, values, pc.binary_join_element_wise(values, "Z", ""))
    elif (
        kind is ColumnType.MOMENT and pa.types.is_primitive(values.type) and not pa.types.is_date(values.type)
    ):
        raise pa.ArrowTypeError(f"{values.type} is not a timestamp")
    found = values.cast(TYPES[kind])
    if kind is ColumnType.FLOAT:  # text may say "nan"
        found = pc.if_else(pc.is_nan(found), None, found)
    return _readable(found) if kind is ColumnType.MOMENT else found


def _readable(moments: Any) -> Any:
    """Return `moments`; ArrowInvalid if one is of a year that no reader has."""
    bounds = pc.min_max(moments.cast(pa.int64())).as_py()
    if bounds["min"] is not None and not EARLIEST <= bounds["min"] <= bounds["max"] <= LATEST:
        raise pa.ArrowInvalid("a timestamp outside the years 1 to 9999")
    return moments
