"""Parquet files joined byte after byte are one file to every reader."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.errors import Damaged
from falaj.serving.runtime.batch_prediction.parquet_footers import (
    MAGIC,
    TAIL_BYTES,
    footer_of,
    joined_footer,
)


def encoded(rows: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, **options)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def joined(parts: list[bytes]) -> bytes:
    content, footers = MAGIC, []
    for part in parts:
        footer = footer_of(part)
        footers.append((footer, len(content) - len(MAGIC)))
        content += part[len(MAGIC) : -TAIL_BYTES - len(footer)]
    return content + joined_footer(footers)


@pytest.mark.parametrize("options", [{}, {"write_page_index": True}, {"compression": "zstd"}])
def test_many_parts_are_one_file_to_every_reader(tmp_path: Path, options: dict[str, Any]) -> None:
    size = 5000
    rows = pa.table(
        {
            "number": range(size),
            "text": [f"x{n % 7}" if n % 3 else None for n in range(size)],
            "list": pa.array([[1.0] * (n % 4) for n in range(size)], pa.list_(pa.float32())),
            "price": [Decimal("1.5")] * size,
            "at": [datetime(2026, 1, 1, tzinfo=UTC)] * size,
            "flag": [n % 2 == 0 for n in range(size)],
            "place": [{"x": n, "y": "q"} for n in range(size)],
        }
    )
    path = tmp_path / "joined.parquet"

    path.write_bytes(joined([encoded(rows.slice(at, 125), **options) for at in range(0, size, 125)]))

    assert pq.read_table(path).equals(rows)
    assert pq.read_metadata(path).num_row_groups == 40
    found = duckdb.sql(
        f"SELECT count(*), sum(number), max(text), sum(place.x) FROM '{path}' WHERE number >= 4000"
    )
    assert found.fetchall() == [(1000, 4499500, "x6", 4499500)]


def test_parts_without_rows_leave_the_columns(tmp_path: Path) -> None:
    empty = pa.table({"number": pa.array([], pa.int64())})
    path = tmp_path / "joined.parquet"

    path.write_bytes(joined([encoded(empty), encoded(empty)]))

    assert pq.read_table(path).schema == empty.schema


@settings(max_examples=200)
@given(st.data())
def test_a_footer_that_lies_is_damaged_and_nothing_else(data: st.DataObject) -> None:
    footer = bytearray(footer_of(encoded(pa.table({"a": range(100), "b": ["x"] * 100}))))
    for _ in range(data.draw(st.integers(1, 5))):
        footer[data.draw(st.integers(0, len(footer) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(footer[: data.draw(st.integers(0, len(footer)))])

    with suppress(Damaged):
        joined_footer([(cut, 10)])
