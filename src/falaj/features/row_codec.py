"""Encode and decode the features of one key as bytes of a fixed layout.

A row:

    event time   8 bytes, microseconds since 1970
    nulls        a bit per feature
    values       8 bytes per feature, in order; for text: its offset after the values, and its length

A value is the rows of a key that are its newest known, one after the other:

    count        4 bytes
    spans        for each row, from when it is the newest known (8 bytes, microseconds since 1970), and its length (4)
    rows

The bytes do not name the features: each version of a view has one layout and is stored under its own name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from falaj.ports.metadata import from_micros, to_micros
from falaj.records.features import ColumnType, Feature, Value

_CODES = {
    ColumnType.INTEGER: "q",
    ColumnType.FLOAT: "d",
    ColumnType.BOOLEAN: "q",
    ColumnType.MOMENT: "q",
    ColumnType.TEXT: "II",
}


ALWAYS = -(1 << 63)
"""The moment from which a row is known that was known before anyone could ask."""

_COUNT = struct.Struct("<I")
_SPAN = struct.Struct("<qI")


def join_rows(rows: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the value of a key: encoded rows, each with the moment from which it is known, in their order."""
    spans = b"".join(_SPAN.pack(known, len(row)) for known, row in rows)
    return _COUNT.pack(len(rows)) + spans + b"".join(row for _, row in rows)


def row_at(value: bytes, now: int) -> bytes | None:
    """Return the encoded row that is the newest known at `now` (microseconds); none if none is known yet."""
    (count,) = _COUNT.unpack_from(value)
    offset, found = _COUNT.size + count * _SPAN.size, None
    for known, length in _SPAN.iter_unpack(value[_COUNT.size : offset]):
        if known > now:
            break
        found = value[offset : offset + length]
        offset += length
    return found


class RowCodec:
    """Encodes and decodes rows with the values of the given features."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self._kinds = [feature.type for feature in features]
        self._null_bytes = (len(self._kinds) + 7) // 8
        codes = "".join(_CODES[kind] for kind in self._kinds)
        self._struct = struct.Struct(f"<q{self._null_bytes}s{codes}")

    def encode(self, events: Iterable[int], columns: Sequence[Iterable[Any]]) -> Iterator[bytes]:
        """Encode rows; `columns` hold Python values."""
        for event, *values in zip(events, *columns, strict=True):
            yield self._encode_row(event, values)

    def decode(self, stored: bytes) -> tuple[datetime, tuple[Value, ...]]:
        event, nulls, *raw = self._struct.unpack_from(stored)
        mask, tail = int.from_bytes(nulls, "little"), stored[self._struct.size :]
        values: list[Value] = []
        parts = iter(raw)
        for number, kind in enumerate(self._kinds):
            value = _restored(kind, parts, tail)
            values.append(None if mask >> number & 1 else value)
        return from_micros(event), tuple(values)

    def _encode_row(self, event: int, values: list[Any]) -> bytes:
        mask, flat, tail = 0, list[Any](), b""
        for number, (kind, given) in enumerate(zip(self._kinds, values, strict=True)):
            value = None if kind is ColumnType.FLOAT and _is_nan(given) else given
            if value is None:
                mask |= 1 << number
            if kind is ColumnType.TEXT:
                text = b"" if value is None else value.encode()
                flat += [len(tail), len(text)]
                tail += text
            elif isinstance(value, datetime):
                flat.append(to_micros(value))
            else:
                flat.append(0 if value is None else value)
        return self._struct.pack(event, mask.to_bytes(self._null_bytes, "little"), *flat) + tail


def _is_nan(value: float | None) -> bool:
    """NaN is null, here as in the rows of a view: pandas writes nulls so."""
    return value is not None and math.isnan(value)


def _restored(kind: ColumnType, parts: Iterator[Any], tail: bytes) -> Value:
    first: Any = next(parts)
    if kind is ColumnType.TEXT:
        return tail[first : first + next(parts)].decode()
    if kind is ColumnType.BOOLEAN:
        return bool(first)
    if kind is ColumnType.MOMENT:
        return from_micros(first).isoformat()
    number: int | float = first
    return number
