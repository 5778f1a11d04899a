"""Compute request-time features for the rows of a training set.

Other modules import this one inside functions, because pyarrow and numpy are slow to load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from falaj.features.arrow_tables import BATCH_ROWS, TYPES
from falaj.features.request_time.evaluation import ValueColumn, evaluate
from falaj.ports.queries import ArrowTable
from falaj.records.expressions.syntax import parse
from falaj.records.expressions.types import BOOLEAN, FLOAT, INTEGER, MOMENT, TEXT, type_of
from falaj.records.features import ColumnType, RequestFeature


def column_types(rows: ArrowTable) -> dict[str, ColumnType]:
    """Return the types of the columns that expressions can use, as they see them."""
    kinds = {field.name: _kind(field.type) for field in rows.schema}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def add_columns(rows: ArrowTable, features: Sequence[RequestFeature]) -> ArrowTable:
    """Return `rows` with a column for each of the features, whose types are resolved; missing values are null."""
    if not features:
        return rows
    made: dict[str, list[Any]] = {each.name: [] for each in features}
    wanted = {name for each in features for name in each.inputs} - made.keys()
    used = rows.select([name for name in rows.column_names if name in wanted])
    for start in range(0, rows.num_rows, BATCH_ROWS):
        part = used.slice(start, BATCH_ROWS)
        for name, values in _computed(part, features, min(BATCH_ROWS, rows.num_rows - start)).items():
            made[name].append(_to_arrow(values))
    kinds = _result_types(features)
    for name, chunks in made.items():
        rows = rows.append_column(name, pa.chunked_array(chunks, TYPES[kinds[name]]))
    return rows


def _computed(part: ArrowTable, features: Sequence[RequestFeature], count: int) -> Mapping[str, ValueColumn]:
    columns = {name: _from_arrow(part[name]) for name in part.column_names}
    return evaluate([(each.name, each.expression) for each in features], columns, count)


def _result_types(features: Sequence[RequestFeature]) -> dict[str, ColumnType]:
    return {each.name: type_of(parse(each.expression), each.inputs) for each in features}


def _kind(kind: Any) -> ColumnType | None:
    if pa.types.is_dictionary(kind):
        return _kind(kind.value_type)
    if pa.types.is_boolean(kind):
        return BOOLEAN
    if pa.types.is_integer(kind):
        return None if kind == pa.uint64() else INTEGER
    if pa.types.is_floating(kind):
        return FLOAT
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return TEXT
    return MOMENT if pa.types.is_timestamp(kind) or pa.types.is_date(kind) else None


def _from_arrow(column: Any) -> ValueColumn:
    kind = _kind(column.type)
    values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if kind is FLOAT:
        floats = values.cast(pa.float64())
        return ValueColumn(
            FLOAT, np.ascontiguousarray(pc.fill_null(floats, math.nan).to_numpy(zero_copy_only=False))
        )
    if kind is MOMENT:
        values = values.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    elif kind is not None:
        values = values.cast(TYPES[kind])
    missing = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    empty: Any = "" if kind is TEXT else False if kind is BOOLEAN else 0
    plain = pc.fill_null(values, empty).to_numpy(zero_copy_only=False)
    return ValueColumn(kind or TEXT, np.ascontiguousarray(plain), missing)


def _to_arrow(column: ValueColumn) -> Any:
    mask = column.is_missing
    return pa.array(column.values, TYPES[column.type], mask=mask if mask.any() else None)
