"""The history of one metric as an Arrow stream, read a page at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from falaj.governance.operations.operation import ArrowStream
from falaj.ports.metadata import Database
from falaj.records.tracking import INT64_MIN
from falaj.tracking import store
from falaj.tracking.series import Point


def read_history(database: Database, series: int, *, from_step: int) -> ArrowStream:
    """The points of `series` from `from_step` on, by step and time."""
    import pyarrow as pa

    fields = [("step", pa.int64()), ("timestamp", pa.timestamp("us", tz="UTC")), ("value", pa.float64())]
    schema = pa.schema(fields)
    pages = _pages(database, series, from_step)
    reader: ArrowStream = pa.RecordBatchReader.from_batches(
        schema, (pa.record_batch(_columns(page), schema=schema) for page in pages)
    )
    return reader


def _pages(database: Database, series: int, from_step: int) -> Iterator[list[Point]]:
    """One page after another, each in a transaction of its own."""
    after: Point = (from_step, INT64_MIN, float("-inf"), False)
    while True:
        with database.read() as tx:
            page = store.history(tx, series, after)
        if page:
            yield page
        if len(page) < store.PAGE:
            return
        after = page[-1]


def _columns(page: list[Point]) -> list[Any]:
    steps, moments, values, nans = zip(*page, strict=True)
    numbers = [float("nan") if is_nan else value for value, is_nan in zip(values, nans, strict=True)]
    return [[*steps], [*moments], numbers]
