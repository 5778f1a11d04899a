"""Queries of metrics: series with their summaries, and blocks of points. See decision 0055."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import bindparam, delete, func, insert, select

from falaj.governance.objects import RowsByIds, rows_by_ids
from falaj.ports.metadata import Transaction, from_micros, to_micros
from falaj.records.names import ObjectId
from falaj.records.record import unvalidated
from falaj.records.tracking import INT64_MAX, INT64_MIN, Metric, MetricPoint, ModelMetric, PointColumns
from falaj.tracking.series import (
    NAN,
    POINT_BYTES,
    PackedPoints,
    Point,
    SeriesSummary,
    extend_summary,
    group_points,
    pack,
    unpack,
)
from falaj.tracking.tables import batches, blocks, model_metrics, series

OPEN_BLOCKS = 32
"""Blocks of a series that are merged into one when there are so many."""
OPEN_POINTS = 8192
"""Points of such blocks that are merged even if they are fewer; a merged block of so many is final."""

_BLOCK = ("series", "number", "first_step", "first_at", "last_step", "last_at", "data")
_series = RowsByIds(select(series).where(series.c.run == bindparam("run")), series.c.key)
_new_series = insert(series).returning(series.c.id, series.c.key)
_SUMMARY = ("run", "key", "points", "last", "last_step", "last_at", "low", "high")
_SUMMARIES = f"SELECT {', '.join(_SUMMARY)} FROM tracking_series WHERE run"  # noqa: S608 - constants


class SeriesState(NamedTuple):
    """A stored series: its id, summary, the number of its next block, and what is open to be merged."""

    id: int
    summary: SeriesSummary
    blocks: int
    open_from: int
    open_points: int


class BlockRange(NamedTuple):
    """A stored block: its number, its size, and where it begins and ends."""

    number: int
    points: int
    first: tuple[int, int]
    last: tuple[int, int]


class LoggedBatch(NamedTuple):
    """The digest of a batch of points that was logged, and its result."""

    digest: str
    stored: int
    repeated: int


# --------------------------------------------------------------------------------------------- writing


def add_points(
    tx: Transaction, run: ObjectId, given: Iterable[MetricPoint] | PointColumns, *, now: datetime
) -> int:
    """Store the points that are not stored yet, and return their number. The run must be locked."""
    groups = group_points(given, now=now)
    known = _known_series(tx, run, list(groups))
    new = {key: _unseen(tx, known.get(key), found) for key, found in groups.items()}
    new = {key: found for key, found in new.items() if found}
    rows = [_append(tx, known[key], found) for key, found in new.items() if key in known]
    rows += _start(tx, run, {key: found for key, found in new.items() if key not in known})
    if rows:
        tx.bulk_insert("tracking_blocks", _BLOCK, rows)
    return sum(len(found) for found in new.values())


def _known_series(tx: Transaction, run: ObjectId, keys: Sequence[str]) -> dict[str, SeriesState]:
    found: dict[str, SeriesState] = {}
    for row in _series.fetch(tx, keys, run=run):
        last = row["last"]
        greatest = (row["last_step"], row["last_at"], 0.0 if last is None else last, last is None)
        summary = SeriesSummary(row["points"], greatest, row["low"], row["high"])
        found[row["key"]] = SeriesState(
            row["id"], summary, row["blocks"], row["open_from"], row["open_points"]
        )
    return found


def _unseen(tx: Transaction, known: SeriesState | None, given: list[Point]) -> list[Point]:
    """Return those of the sorted `given` that are not stored yet."""
    if known is None or known.summary.is_before(given):
        return given
    lowest, highest = given[0][0], given[-1][0]
    steps = {point[0] for point in given}
    stored: set[Point] = set()
    for found in _ranges(tx, known.id, from_step=lowest, to_step=highest):
        block = _load(tx, known.id, [found.number])
        within = block.part((block.steps >= lowest) & (block.steps <= highest))
        stored |= {point for point in within.points() if point[0] in steps}
    return [point for point in given if point not in stored]


def _append(tx: Transaction, known: SeriesState, new: list[Point]) -> tuple[Any, ...]:
    """Update the series, and return the block that holds `new`: one of its own, or merged with the open ones."""
    number, points = known.blocks, known.open_points + len(new)
    data, first, last = pack(new), new[0][:2], new[-1][:2]
    start, is_merged = known.open_from, False
    if number + 1 - start >= OPEN_BLOCKS or points >= OPEN_POINTS:
        is_merged = True
        if number > start:
            merged = unpack([*_stored(tx, known.id, range(start, number)), data])
            tx.execute(delete(blocks).where(blocks.c.series == known.id, blocks.c.number >= start))
            first, last = _end(merged, 0), _end(merged, -1)
            data, number = merged.data(), start
    is_final = is_merged and points >= OPEN_POINTS
    state = {
        "blocks": number + 1,
        "open_from": number + 1 if is_final else start,
        "open_points": 0 if is_final else points,
    }
    tx.update(series, {"id": known.id}, _columns(extend_summary(known.summary, new)) | state)
    return (known.id, number, *first, *last, data)


def _start(tx: Transaction, run: ObjectId, new: Mapping[str, list[Point]]) -> list[tuple[Any, ...]]:
    """Insert series, and return their first blocks."""
    if not new:
        return []
    rows = []
    for key, found in new.items():
        is_final = len(found) >= OPEN_POINTS
        state = {"blocks": 1, "open_from": int(is_final), "open_points": 0 if is_final else len(found)}
        rows.append({"run": run, "key": key, **_columns(extend_summary(None, found)), **state})
    made = {key: ident for ident, key in tx.execute(_new_series, rows)}
    return [(made[key], 0, *found[0][:2], *found[-1][:2], pack(found)) for key, found in new.items()]


def _end(found: PackedPoints, at: int) -> tuple[int, int]:
    return int(found.steps[at]), int(found.moments[at])


def _columns(summary: SeriesSummary) -> dict[str, Any]:
    step, at, value, is_nan = summary.greatest
    return {
        "points": summary.points,
        "last": None if is_nan else value,
        "last_step": step,
        "last_at": at,
        "low": summary.low,
        "high": summary.high,
    }


def batch(tx: Transaction, run: ObjectId, ident: str) -> LoggedBatch | None:
    """Return the result of a batch that was sent before, or None."""
    query = select(batches.c.digest, batches.c.stored, batches.c.repeated).where(
        batches.c.run == run, batches.c.batch == ident
    )
    found = tx.execute(query).one_or_none()
    return None if found is None else LoggedBatch(*found)


def add_batch(tx: Transaction, run: ObjectId, ident: str, *, digest: str, stored: int, repeated: int) -> None:
    row = {"run": run, "batch": ident, "digest": digest, "stored": stored, "repeated": repeated}
    tx.execute(insert(batches), row)


# --------------------------------------------------------------------------------------------- reading


def summaries_of_runs(
    tx: Transaction, runs: Sequence[str], keys: Sequence[str] | None = None
) -> dict[str, list[Metric]]:
    """Return the summaries of several runs by run: of all metrics, or of those with `keys`."""
    found: defaultdict[str, list[Metric]] = defaultdict(list)
    rows: Iterable[Any] = rows_by_ids(tx, _SUMMARIES, runs)
    if keys is not None:
        columns = [series.c[name] for name in _SUMMARY]
        rows = tx.execute(select(*columns).where(series.c.key.in_(keys), series.c.run.in_(runs)))
    for run, key, points, last, last_step, last_at, low, high in rows:
        summary = {
            "key": key,
            "points": points,
            "last": NAN if last is None else last,
            "last_step": last_step,
            "last_timestamp": from_micros(last_at),
            "low": low,
            "high": high,
        }
        found[run].append(unvalidated(Metric, summary))
    return {run: sorted(metrics, key=_by_key) for run, metrics in found.items()}


_by_key = attrgetter("key")


def series_id(tx: Transaction, run: ObjectId, key: str) -> int | None:
    return tx.execute(select(series.c.id).where(series.c.run == run, series.c.key == key)).scalar()


def history(
    tx: Transaction, series: int, *, after: Point | None, from_step: int = INT64_MIN, limit: int
) -> PackedPoints:
    """Return the next points of a metric behind `after`, or from `from_step`, in order: up to `limit`."""
    begin = from_step if after is None else max(after[0], from_step)
    found = unpack([])
    for cluster in _clusters(_ranges(tx, series, from_step=begin)):
        block = _load(tx, series, [each.number for each in cluster])
        block = block.part(block.steps >= from_step) if after is None else block.after(after)
        found = unpack([found.data(), block.data()]) if len(found) else block
        if len(found) >= limit:
            break
    return found.part(slice(limit))


def all_points(tx: Transaction, series: int, *, from_step: int, to_step: int) -> PackedPoints:
    """Return the points of a metric in a range of steps, in order."""
    ranges = _ranges(tx, series, from_step=from_step, to_step=to_step)
    found = _load(tx, series, [each.number for each in ranges])
    if ranges and (from_step > INT64_MIN or to_step < INT64_MAX):
        return found.part((found.steps >= from_step) & (found.steps <= to_step))
    return found


def _ranges(tx: Transaction, series: int, *, from_step: int, to_step: int = INT64_MAX) -> list[BlockRange]:
    """Return the blocks that have steps in a range, by where they begin."""
    columns = (blocks.c.first_step, blocks.c.first_at, blocks.c.last_step, blocks.c.last_at)
    query = (
        select(blocks.c.number, func.length(blocks.c.data), *columns)
        .where(blocks.c.series == series, blocks.c.last_step >= from_step, blocks.c.first_step <= to_step)
        .order_by(blocks.c.first_step, blocks.c.first_at, blocks.c.number)
    )
    return [
        BlockRange(number, size // POINT_BYTES, (first_step, first_at), (last_step, last_at))
        for number, size, first_step, first_at, last_step, last_at in tx.execute(query)
    ]


def _clusters(ranges: Iterable[BlockRange]) -> Iterator[list[BlockRange]]:
    """Yield blocks that overlap together: all points of one cluster come before those of the next."""
    cluster: list[BlockRange] = []
    end = (INT64_MIN, INT64_MIN)
    for each in ranges:
        if cluster and each.first > end:
            yield cluster
            cluster = []
        cluster.append(each)
        end = max(end, each.last)
    if cluster:
        yield cluster


def _load(tx: Transaction, series: int, numbers: Sequence[int]) -> PackedPoints:
    return unpack(_stored(tx, series, numbers))


def _stored(tx: Transaction, series: int, numbers: Sequence[int]) -> Iterator[bytes]:
    """Yield the bytes of blocks; those of one range of numbers are read together."""
    if not numbers:
        return
    wanted = set(numbers)
    sql = (
        "SELECT number, data FROM tracking_blocks WHERE series = ? AND number BETWEEN ? AND ? ORDER BY number"
    )
    for number, data in tx.execute_sql(sql, (series, min(numbers), max(numbers))):
        if number in wanted:
            yield data


# ------------------------------------------------------------------------------------ metrics of models


def add_model_metrics(
    tx: Transaction,
    run: ObjectId,
    given: Iterable[MetricPoint],
    models: Mapping[str, ObjectId],
    *,
    now: datetime,
) -> None:
    """Keep the newest value of each metric that a point says was measured on a logged model."""
    newest: dict[tuple[str, ...], tuple[int, int, float | None]] = {}
    for point in given:
        if point.model is None:
            continue
        at = to_micros(point.timestamp or now)
        value = None if point.value != point.value else point.value
        key = (models[point.model], point.key, point.dataset or "", point.dataset_digest or "")
        if key not in newest or newest[key][:2] <= (point.step, at):
            newest[key] = (point.step, at, value)
    for (model, name, dataset, digest), (step, at, value) in newest.items():
        key_columns = {"model": model, "key": name, "run": run, "dataset": dataset, "dataset_digest": digest}
        matches = [model_metrics.c[column] == part for column, part in key_columns.items()]
        known = tx.execute(select(model_metrics.c.step, model_metrics.c.at).where(*matches)).one_or_none()
        values = {"step": step, "at": at, "value": value}
        if known is None:
            tx.insert(model_metrics, key_columns | values)
        elif tuple(known) <= (step, at):
            tx.update(model_metrics, key_columns, values)


_metrics_of_models = RowsByIds(select(model_metrics), model_metrics.c.model)


def metrics_of_models(tx: Transaction, models: Sequence[str]) -> dict[str, list[ModelMetric]]:
    """Return the newest values of the metrics of logged models, by model."""
    found: dict[str, list[ModelMetric]] = {}
    for row in sorted(_metrics_of_models.fetch(tx, models), key=lambda row: (row["key"], row["at"])):
        found.setdefault(row["model"], []).append(
            ModelMetric(
                key=row["key"],
                value=float("nan") if row["value"] is None else row["value"],
                step=row["step"],
                timestamp=from_micros(row["at"]),
                run=row["run"],
                dataset=row["dataset"] or None,
                dataset_digest=row["dataset_digest"] or None,
            )
        )
    return found
