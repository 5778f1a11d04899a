"""Queries of the tracking tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, RowMapping, Table, bindparam, exists, insert, select, update

from falaj.governance.objects import LISTED, RowsByIds, stored_object
from falaj.governance.tables import objects
from falaj.ports.metadata import Prepared, Transaction, from_micros
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId
from falaj.records.tracking import Artifact, Metric, MetricPoint, Param, Run, RunDetails, RunStatus, Tag
from falaj.tracking.series import Point, SeriesSummary, extend_summary, group_points
from falaj.tracking.tables import artifacts, batches, params, points, runs, series, tags

T = TypeVar("T")

SLICE = 900
"""Values per IN list, below every database's limit."""
PAGE = 10_000
"""Points per page of a history."""

_CONDITION = re.compile(r"(metrics|params|tags)\.(.+?)\s*(<=|>=|!=|=|<|>)\s*(.*)", re.DOTALL)
_SQL_OF = {"=": "=", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}

_POINT = ("step", "at", "value", "is_nan")
_HISTORY = (
    "SELECT step, at, value, is_nan FROM tracking_points "
    "WHERE series = ? AND (step, at, value, is_nan) > (?, ?, ?, ?) "
    "ORDER BY step, at, value, is_nan LIMIT ?"
)

_run = Prepared(select(runs).where(runs.c.id == bindparam("run")))
_values = {
    table: Prepared(select(table).where(table.c.run == bindparam("run")).order_by(table.c.key))
    for table in (params, tags)
}
_artifacts = Prepared(select(artifacts).where(artifacts.c.run == bindparam("run")).order_by(artifacts.c.path))
_summaries = Prepared(select(series).where(series.c.run == bindparam("run")).order_by(series.c.key))
_status_of = Prepared(select(runs.c.status).where(runs.c.id == bindparam("run")).with_for_update())
_listed = select(
    *LISTED, runs.c.experiment, runs.c.name.label("run_name"), runs.c.status, runs.c.ended_at
).join(runs, runs.c.id == objects.c.id)
_newest = Prepared(
    _listed.where(runs.c.experiment == bindparam("experiment"), objects.c.deleted_at.is_(None))
    .order_by(runs.c.id.desc())
    .limit(bindparam("limit"))
)
_after = Prepared(_newest.query.where(runs.c.id < bindparam("before")))
_series = RowsByIds(select(series).where(series.c.run == bindparam("run")), series.c.key)
_new_series = insert(series).returning(series.c.id, series.c.key)


class LoggedBatch(NamedTuple):
    """The digest of a batch of points that was logged, and its result."""

    digest: str
    stored: int
    repeated: int


# ------------------------------------------------------------------------------------------------ runs


def lock(tx: Transaction, run: ObjectId) -> RunStatus | None:
    """Return the status of a run, locked until the transaction ends, or None if there is no such run."""
    rows = tx.fetch(_status_of, {"run": run})
    return RunStatus(rows[0]["status"]) if rows else None


def lock_names(tx: Transaction, workspace: ObjectId) -> None:
    """Lock the names of a workspace against other callers of this function until the transaction ends."""
    tx.execute(select(objects.c.id).where(objects.c.id == workspace).with_for_update(key_share=True))


def create_run(tx: Transaction, new: StoredObject, *, experiment: ObjectId, name: str | None) -> Run:
    row = {
        "id": new.id,
        "experiment": experiment,
        "name": name or new.id,
        "status": RunStatus.RUNNING,
        "ended_at": None,
    }
    tx.insert(runs, row)
    return _run_record(new, row, name=name or new.id)


def end_run(tx: Transaction, run: ObjectId, *, status: str, now: datetime) -> None:
    tx.execute(update(runs).where(runs.c.id == run).values(status=status, ended_at=now))


def run_record(tx: Transaction, found: StoredObject) -> Run:
    (row,) = tx.fetch(_run, {"run": found.id})
    return _run_record(found, row, name=row["name"])


def details(tx: Transaction, found: StoredObject) -> RunDetails:
    return RunDetails(
        run=run_record(tx, found),
        params=tuple(Param(key=key, value=value) for key, value in values_of(tx, params, found.id).items()),
        tags=tuple(Tag(key=key, value=value) for key, value in values_of(tx, tags, found.id).items()),
        metrics=tuple(summaries(tx, found.id)),
        artifacts=tuple(artifact_record(row) for row in tx.fetch(_artifacts, {"run": found.id})),
    )


def matching(
    tx: Transaction,
    experiment: ObjectId,
    visible: Sequence[ColumnElement[bool]],
    *,
    status: RunStatus | None,
    conditions: Sequence[str],
    before: str,
    limit: int,
) -> list[tuple[StoredObject, Any]]:
    """Return the runs of an experiment that meet every condition, newest first, before the one with the id `before`."""
    if not conditions and status is None and not visible:
        given = {"experiment": experiment, "before": before, "limit": limit}
        return [(stored_object(row), row) for row in tx.fetch(_after if before else _newest, given)]
    met = map(_clause, conditions)
    query = _listed.where(runs.c.experiment == experiment, objects.c.deleted_at.is_(None), *visible, *met)
    if status is not None:
        query = query.where(runs.c.status == status)
    if before:
        query = query.where(runs.c.id < before)
    rows = tx.execute(query.order_by(runs.c.id.desc()).limit(limit)).mappings()
    return [(stored_object(row), row) for row in rows]


def listed_run(found: StoredObject, row: Any) -> Run:
    return _run_record(found, row, name=row["run_name"])


def _clause(condition: str) -> ColumnElement[bool]:
    """Return a condition as SQL: the run has the key, with a value that meets the comparison."""
    found = _CONDITION.fullmatch(condition)
    assert found is not None, condition  # noqa: S101 - the type Condition has checked it
    where, key, operator, text = found.groups()
    table = {"metrics": series, "params": params, "tags": tags}[where]
    column = series.c["last"] if where == "metrics" else table.c.value
    value = float(text) if where == "metrics" else text
    compared = column.op(_SQL_OF[operator], is_comparison=True)(value)
    return exists().where(table.c.run == runs.c.id, table.c.key == key, compared)


def _run_record(found: StoredObject, row: RowMapping | Mapping[str, Any], *, name: str) -> Run:
    return Run(
        id=found.id,
        workspace=found.workspace,
        experiment=row["experiment"],
        name=name,
        status=RunStatus(row["status"]),
        owner=found.owner,
        label=found.label,
        started_at=found.created_at,
        ended_at=row["ended_at"],
    )


# ------------------------------------------------------------------------- parameters, tags, artifacts


def values_of(tx: Transaction, table: Table, run: ObjectId) -> dict[str, str]:
    """Return the parameters or the tags of a run by key."""
    return {row["key"]: row["value"] for row in tx.fetch(_values[table], {"run": run})}


def put_values(tx: Transaction, table: Table, run: ObjectId, values: Mapping[str, str]) -> None:
    """Set parameters or tags; existing ones are replaced."""
    known = values_of(tx, table, run) if values else {}
    for key, value in values.items():
        if key in known:
            tx.update(table, {"run": run, "key": key}, {"value": value})
        else:
            tx.insert(table, {"run": run, "key": key, "value": value})


def artifact_at(tx: Transaction, run: ObjectId, path: str) -> Artifact | None:
    query = select(artifacts).where(artifacts.c.run == run, artifacts.c.path == path)
    row = tx.execute(query).mappings().one_or_none()
    return None if row is None else artifact_record(row)


def add_artifact(tx: Transaction, run: ObjectId, new: Artifact) -> None:
    tx.execute(insert(artifacts), {"run": run, **new.model_dump()})


def artifact_record(row: RowMapping | Mapping[str, Any]) -> Artifact:
    return Artifact(
        path=row["path"], blob=row["blob"], size_bytes=row["size_bytes"], attached_at=row["attached_at"]
    )


# --------------------------------------------------------------------------------------------- metrics


def add_points(tx: Transaction, run: ObjectId, given: Iterable[MetricPoint], *, now: datetime) -> int:
    """Store the points that are not stored yet, and return their number. The run must be locked."""
    groups = group_points(given, now=now)
    known = _known_series(tx, run, list(groups))
    new = {key: _unseen(tx, known.get(key), found) for key, found in groups.items()}
    new = {key: found for key, found in new.items() if found}
    idents = _put_series(tx, run, known, new)
    rows = ((idents[key], *point) for key, found in new.items() for point in found)
    if new:
        tx.bulk_insert("tracking_points", ("series", *_POINT), rows)
    return sum(len(found) for found in new.values())


def summaries(tx: Transaction, run: ObjectId) -> Iterator[Metric]:
    for row in tx.fetch(_summaries, {"run": run}):
        yield Metric(
            key=row["key"],
            points=row["points"],
            last=float("nan") if row["last"] is None else row["last"],
            last_step=row["last_step"],
            last_timestamp=from_micros(row["last_at"]),
            low=row["low"],
            high=row["high"],
        )


def series_id(tx: Transaction, run: ObjectId, key: str) -> int | None:
    return tx.execute(select(series.c.id).where(series.c.run == run, series.c.key == key)).scalar()


def history(tx: Transaction, series: int, after: Point) -> list[Point]:
    """Return the next page of points of a metric after `after`, in order."""
    return [
        (step, at, value, bool(is_nan))
        for step, at, value, is_nan in tx.execute_sql(_HISTORY, (series, *after, PAGE))
    ]


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


def _known_series(
    tx: Transaction, run: ObjectId, keys: Sequence[str]
) -> dict[str, tuple[int, SeriesSummary]]:
    found: dict[str, tuple[int, SeriesSummary]] = {}
    for row in _series.fetch(tx, keys, run=run):
        last = row["last"]
        greatest = (row["last_step"], row["last_at"], 0.0 if last is None else last, last is None)
        found[row["key"]] = row["id"], SeriesSummary(row["points"], greatest, row["low"], row["high"])
    return found


def _unseen(tx: Transaction, known: tuple[int, SeriesSummary] | None, given: list[Point]) -> list[Point]:
    """Return those of the sorted `given` that are not stored yet."""
    if known is None or known[1].is_before(given):
        return given
    moments = [at for _, at, _, _ in given]
    query = select(*(points.c[name] for name in _POINT)).where(
        points.c.series == known[0], points.c.at.between(min(moments), max(moments))
    )
    steps = list(dict.fromkeys(step for step, _, _, _ in given))
    stored = {
        tuple(row) for some in _slices(steps) for row in tx.execute(query.where(points.c.step.in_(some)))
    }
    return [point for point in given if point not in stored]


def _put_series(
    tx: Transaction,
    run: ObjectId,
    known: Mapping[str, tuple[int, SeriesSummary]],
    new: Mapping[str, list[Point]],
) -> dict[str, int]:
    """Update the summaries of the metrics that `new` adds to, and return their ids."""
    for key, found in new.items():
        if key in known:
            ident, summary = known[key]
            tx.update(series, {"id": ident}, _columns(extend_summary(summary, found)))
    first = [
        {"run": run, "key": key, **_columns(extend_summary(None, found))}
        for key, found in new.items()
        if key not in known
    ]
    made = tx.execute(_new_series, first) if first else ()
    return {key: ident for key, (ident, _) in known.items()} | {key: ident for ident, key in made}


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


def _slices(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[i : i + SLICE] for i in range(0, len(items), SLICE))
