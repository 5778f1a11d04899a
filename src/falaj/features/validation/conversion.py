"""Convert columns to the types of views and of tables, and find the values that cannot be converted.

Other modules import this one inside functions, because pyarrow is slow to load.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from falaj.errors import Fault, InvalidInput, shorten
from falaj.features.arrow_tables import converted
from falaj.ports.queries import ArrowTable
from falaj.records.features import ColumnType

SHOWN_ROWS = 3
"""Bad rows that an error names."""
FORMS = {
    ColumnType.INTEGER: r"^[+-]?(0[xX][0-9a-fA-F]+|[0-9]+)$",
    ColumnType.FLOAT: r"(?i)^[+-]?([0-9.][0-9.e+-]*|inf(inity)?|nan(\(\w*\))?)$",
    ColumnType.BOOLEAN: r"(?i)^(true|false|0|1)$",
    ColumnType.MOMENT: r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])([ T][0-9:.]+)?(Z|[+-]\d\d:?\d\d)?$",
}
"""What every text has that can be cast; trying values one by one takes 10 to 50 µs for each that cannot."""


def storable(rows: ArrowTable, *, where: str) -> ArrowTable:
    """Return `rows` in types that table stores take. Raise InvalidInput with all faults."""
    faults: list[Fault] = []
    columns = [
        _storable(column, name, where, faults)
        for name, column in zip(rows.column_names, rows.columns, strict=True)
    ]
    if faults:
        raise InvalidInput(f"{where}: {len(faults)} columns cannot be stored", faults=faults)
    return pa.table(columns, names=rows.column_names)


def _storable(column: Any, name: str, where: str, faults: list[Fault]) -> Any:
    kind, types = column.type, pa.types
    if types.is_float16(kind):
        return column.cast(pa.float32())
    if types.is_unsigned_integer(kind):  # tables have signed ones of the same width
        found = cast_column(column, name, ColumnType.INTEGER, where, faults)
        return column if found is None else found
    if types.is_timestamp(kind) or types.is_date(kind):
        cast_column(column, name, ColumnType.MOMENT, where, faults)
    elif not _is_storable(kind):
        given = shorten(str(kind), limit=200)
        faults.append(Fault(where=f"{where}.{shorten(name)}", given=given, allowed=STORED_TYPES))
    return column


def _is_storable(kind: Any) -> bool:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_storable(kind.value_type)
    if types.is_map(kind):
        return _is_storable(kind.key_type) and _is_storable(kind.item_type)
    if types.is_struct(kind):
        inner = [kind.field(number).type for number in range(kind.num_fields)]
        return bool(inner) and all(map(_is_storable, inner))
    if types.is_integer(kind) or types.is_floating(kind):
        return not types.is_uint64(kind) and not types.is_float16(kind)
    if types.is_fixed_size_binary(kind) and not types.is_decimal(kind):
        return bool(kind.byte_width)
    return any(is_kind(kind) for is_kind in STORED_KINDS)


STORED_KINDS = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_decimal128,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_timestamp,
    pa.types.is_date,
)
STORED_TYPES = "numbers, booleans, text, bytes, dates, timestamps, and lists, structs and maps of these"


def cast_column(values: Any, name: str, kind: ColumnType, where: str, faults: list[Fault]) -> Any:
    """Return `values` in the type `kind`; on failure return None and add a fault with the first bad rows."""
    try:
        return converted(values, kind)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
        given = f"{values.type}, which cannot be cast to {type_name(kind)}"
    except pa.ArrowInvalid:
        bad = _bad_rows(values, kind, 0, SHOWN_ROWS + 1)
        given = f"{values.type}: {shown_rows(values, bad)}"
    faults.append(Fault(where=f"{where}.{shorten(name)}", given=given, allowed=type_name(kind)))
    return None


def inconvertible_rows(values: Any, kind: ColumnType, *, limit: int) -> Any:
    """Return the positions of values that cannot be cast, as an array; of more than `limit`, some more than that.

    Most are told by their form, all at once. Of the others distinct values are tried.
    """
    whole = values.combine_chunks()
    bad = pc.fill_null(_malformed(whole, kind), False)
    others = pc.if_else(bad, pa.scalar(None, whole.type), whole)
    try:
        converted(others, kind)
    except pa.ArrowInvalid:
        bad = pc.or_(bad, _cannot_be_cast(others, kind, limit + 1))
    return pc.indices_nonzero(bad).cast(pa.int64())


def _malformed(values: Any, kind: ColumnType) -> Any:
    """Return a mask of values that surely cannot be cast; not of all such values."""
    if kind in FORMS and (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return pc.invert(pc.match_substring_regex(values, FORMS[kind]))
    if kind is ColumnType.INTEGER and pa.types.is_float64(values.type):
        return pc.not_equal(pc.trunc(values), pc.if_else(pc.is_nan(values), None, values))
    return pa.repeat(False, len(values))


def _cannot_be_cast(values: Any, kind: ColumnType, limit: int) -> Any:
    """Return a mask of values that cannot be cast, of at least `limit` if there are more."""
    try:
        encoded = values.dictionary_encode()
    except pa.ArrowNotImplementedError:
        bad = pa.array(_bad_rows(values, kind, 0, limit), pa.int64())
        return pc.is_in(pa.arange(0, len(values)), bad)
    return pc.is_in(encoded.indices, pa.array(_bad_rows(encoded.dictionary, kind, 0, limit), pa.int32()))


def _bad_rows(values: Any, kind: ColumnType, start: int, limit: int) -> list[int]:
    """Find the first `limit` rows that cannot be cast, by bisection."""
    try:
        converted(values, kind)
    except pa.ArrowInvalid:
        if len(values) == 1:
            return [start]
        half = len(values) // 2
        found = _bad_rows(values[:half], kind, start, limit)
        if len(found) < limit:
            found += _bad_rows(values[half:], kind, start + half, limit - len(found))
        return found
    return []


def shown_rows(values: Any, rows: list[int]) -> str:
    """Return the first of these rows and their values, as an error names them."""
    first = rows[:SHOWN_ROWS]
    shown = ", ".join(shorten(shown_value(values[number]), limit=30) for number in first)
    return f"{shown} in {row_numbers(first, len(rows))}"


def shown_value(value: Any) -> object:
    """Return a value as an error shows it; Python has neither all years nor nanoseconds."""
    try:
        return (value.cast(pa.string()) if pa.types.is_temporal(value.type) else value).as_py()
    except (pa.ArrowInvalid, OverflowError, ValueError, KeyError):  # a time zone that nobody knows
        return getattr(value, "value", str(value.type))


def row_numbers(first: list[int], count: int) -> str:
    """Format row numbers counted from 1, not counting the header of a CSV."""
    numbers = ", ".join(str(number + 1) for number in first)
    return f"row{'s' if len(first) > 1 else ''} {numbers}" + (" and more" if count > len(first) else "")


def type_name(kind: ColumnType) -> str:
    if kind is ColumnType.MOMENT:
        return "a timestamp like 2024-06-01T08:00:00Z, in the years 1 to 9999"
    return str(kind)
