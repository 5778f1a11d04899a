"""Histories of metrics: streamed as Arrow, in pages, and thinned out for plots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from falaj.governance.operations.operation import ArrowStream
from falaj.ports.metadata import Database, Transaction, from_micros
from falaj.records.names import ObjectId
from falaj.records.tracking import HistoryPoint, MetricCurve, MetricHistory
from falaj.tracking import metrics
from falaj.tracking.series import PackedPoints, Point, thin_out

if TYPE_CHECKING:
    import pyarrow as pa

PAGE = 50_000
"""Points that a stream reads at a time."""


def stream(database: Database, series: int, *, from_step: int) -> ArrowStream:
    """Return the points of `series` from `from_step`, by step and time, as an Arrow stream."""
    import pyarrow as pa

    fields = [("step", pa.int64()), ("timestamp", pa.timestamp("us", tz="UTC")), ("value", pa.float64())]
    schema = pa.schema(fields)
    batches = (_record_batch(page, schema) for page in _pages(database, series, from_step))
    reader: ArrowStream = pa.RecordBatchReader.from_batches(schema, batches)
    return reader


def _pages(database: Database, series: int, from_step: int) -> Iterator[PackedPoints]:
    """Yield pages of points, each read in a transaction of its own."""
    after: Point | None = None
    while True:
        with database.read() as tx:
            page = metrics.history(tx, series, after=after, from_step=from_step, limit=PAGE)
        if len(page):
            yield page
        if len(page) < PAGE:
            return
        (after,) = page.part(slice(-1, None)).points()


def _record_batch(page: PackedPoints, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    moments = pa.array(page.moments).cast(schema.field("timestamp").type)
    return pa.record_batch([pa.array(page.steps), moments, pa.array(page.values)], schema=schema)


def page(
    tx: Transaction, runs: Sequence[ObjectId], key: str, *, from_step: int, position: str, limit: int
) -> tuple[tuple[MetricHistory, ...], str | None]:
    """Return the next points of a metric of several runs, one run after another, and the position behind them."""
    number, after = _read_position(position)
    found: list[MetricHistory] = []
    left = limit
    for index in range(number, len(runs)):
        series = metrics.series_id(tx, runs[index], key)
        if series is not None:
            points = metrics.history(tx, series, after=after, from_step=from_step, limit=left + 1)
            shown = points.part(slice(left))
            if len(shown):
                found.append(MetricHistory(run=runs[index], key=key, points=_shown(shown)))
            if len(points) > left:
                last = shown.part(slice(-1, None)).points() or ([after] if after else [])
                return tuple(found), json.dumps([index, last[0] if last else None])
            left -= len(shown)
        after = None
    return tuple(found), None


def _read_position(position: str) -> tuple[int, Point | None]:
    if not position:
        return 0, None
    number, point = json.loads(position)
    return number, None if point is None else tuple(point)


def curves(
    tx: Transaction,
    runs: Sequence[ObjectId],
    keys: Sequence[str],
    *,
    limit: int,
    from_step: int,
    to_step: int,
) -> tuple[MetricCurve, ...]:
    """Return the metrics of runs that have them, each with at most `limit` points."""
    found = []
    for run in runs:
        for key in keys:
            series = metrics.series_id(tx, run, key)
            if series is None:
                continue
            points = metrics.all_points(tx, series, from_step=from_step, to_step=to_step)
            thin = thin_out(points, limit=limit)
            found.append(MetricCurve(run=run, key=key, total=len(points), points=_shown(thin)))
    return tuple(found)


def _shown(found: PackedPoints) -> tuple[HistoryPoint, ...]:
    columns = zip(found.steps.tolist(), found.moments.tolist(), found.values.tolist(), strict=True)
    return tuple(
        HistoryPoint.model_construct(step=step, timestamp=from_micros(at), value=value)
        for step, at, value in columns
    )
