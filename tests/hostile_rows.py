"""Files of rows that lie: Arrow and Parquet with false offsets, lengths, indices and counts."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq

MOMENT = pa.timestamp("us", "UTC")
NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)
CARS = ("aaaa", "bbbb", "cccc")


def rows(car: pa.Array | None = None) -> pa.Table:
    return pa.table(
        {
            "driver": pa.array([7001, 7002, 7003], pa.int64()),
            "event_time": pa.array([NOON + timedelta(hours=n) for n in range(3)], MOMENT),
            "km": pa.array([1.25, 2.25, 4.25], pa.float64()),
            "car": pa.array(CARS, pa.string()) if car is None else car,
        }
    )


def arrow_stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def arrow_file(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def parquet_file(table: pa.Table, **options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **{"compression": "none", "use_dictionary": False, **options})
    return sink.getvalue()


def changed(data: bytes, old: bytes, new: bytes) -> bytes:
    """Replace the last occurrence of bytes that are there."""
    place = data.rindex(old)
    return data[:place] + new + data[place + len(old) :]


def _offsets(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _lying() -> dict[str, bytes]:
    plain, true = arrow_stream(rows()), _offsets(0, 4, 8, 12)
    coded = arrow_stream(rows(pa.array(CARS).dictionary_encode()))
    views = arrow_stream(rows(pa.array([f"{car} and a long text" for car in CARS], pa.string_view())))
    lists = arrow_stream(rows(pa.array([["aaaa"], ["bbbb"], ["cccc"]])))
    runs = arrow_stream(
        rows(pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 3], pa.int32()), pa.array(CARS)))
    )
    length = struct.pack("<q", 24)
    return {
        "last offset": changed(plain, true, _offsets(0, 4, 8, 1 << 20)),
        "inner offset": changed(plain, true, _offsets(0, 4, 1 << 20, 12)),
        "negative offset": changed(plain, true, _offsets(0, -4096, 8, 12)),
        "negative first offset": changed(plain, true, _offsets(-4096, 4, 8, 12)),
        "falling offsets": changed(plain, true, _offsets(0, 8, 4, 12)),
        "offset in a file": changed(arrow_file(rows()), true, _offsets(0, 4, 8, 1 << 20)),
        "no text": changed(plain, b"aaaa", b"\xff\xfe\xff\xfe"),
        "short buffer": changed(plain, length, struct.pack("<q", 8)),
        "more rows than there are": plain.replace(struct.pack("<q", 3), struct.pack("<q", 4096)),
        "index of a dictionary": changed(coded, _offsets(0, 1, 2), _offsets(0, 1, 99_999)),
        "negative index of a dictionary": changed(coded, _offsets(0, 1, 2), _offsets(0, 1, -99)),
        "view beyond its buffer": changed(views, _offsets(0, 0), _offsets(0, 1 << 20)),
        "offset in a list": changed(lists, true, _offsets(0, 4, 8, 1 << 20)),
        "run ends": changed(runs, _offsets(1, 2, 3), _offsets(1, 2, -3)),
        "cut": plain[: len(plain) * 3 // 4],
    }


LYING: Mapping[str, bytes] = _lying()


def bomb(count: int) -> bytes:
    """A small Parquet file of `count` equal rows."""
    sink = io.BytesIO()
    chunk = 1_000_000
    moments = pa.array([NOON], MOMENT)
    schema = rows().schema
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for _ in range(count // chunk):
            columns = [
                pa.repeat(pa.scalar(1, pa.int64()), chunk),
                pa.repeat(moments[0], chunk),
                pa.repeat(1.0, chunk),
                pa.repeat("a", chunk),
            ]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=chunk)
    return sink.getvalue()
