"""The SQL of accounting: one row for each attempt of a job, inserted when it starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, bindparam, case, func, insert, or_, select, tuple_, update

from falaj.ports.metadata import Database, Transaction
from falaj.records.scheduling.accounting import By, PastAttempt
from falaj.records.scheduling.snapshot import WHOLE_GPU, Request
from falaj.scheduling.accounting.decayed_usage import ResourceAverages, UsageSpan
from falaj.scheduling.tables import usage

PAGE = 1000
"""Attempts per read."""

KEYS = {"job": usage.c.job, "user": usage.c.user_id, "workspace": usage.c.workspace, "queue": usage.c.queue}

_CHARGED = [column for column in usage.c if column.name not in ("request", "placements")]
"""All columns but the large ones that do not affect the charge."""

_running = select(
    usage.c.queue, usage.c.cpus, usage.c.gpus_milli, usage.c.memory_bytes, usage.c.started_at
).where(usage.c.ended_at.is_(None))
_ended_in = (
    select(
        usage.c.queue,
        usage.c.cpus,
        usage.c.gpus_milli,
        usage.c.memory_bytes,
        usage.c.started_at,
        usage.c.ended_at,
    )
).where(usage.c.ended_at.is_not(None))


_this = usage.c.job == bindparam("of_job"), usage.c.attempt == bindparam("of_attempt")
_open = select(*_CHARGED).where(*_this, usage.c.ended_at.is_(None)).with_for_update()
_close = update(usage).where(*_this)


def add_attempt(tx: Transaction, values: dict[str, Any]) -> None:
    tx.execute(insert(usage), values)


def open_attempt(tx: Transaction, job: str, attempt: int) -> Any | None:
    """Return the row of an attempt that has not ended, and lock it; None if there is none."""
    return tx.execute(_open, {"of_job": job, "of_attempt": attempt}).mappings().first()


def close_attempt(tx: Transaction, job: str, attempt: int, **values: Any) -> None:
    tx.execute(_close, {"of_job": job, "of_attempt": attempt, **values})


def running_rows(tx: Transaction) -> Iterator[Any]:
    """Return the charge columns of every attempt that has not ended."""
    return iter(tx.execute(select(*_CHARGED).where(usage.c.ended_at.is_(None))).mappings())


def running_spans(tx: Transaction) -> list[tuple[str, UsageSpan]]:
    """Return the queue and usage of every running attempt."""
    return [
        (queue, UsageSpan(sums(cpus, gpus_milli, memory), started_at))
        for queue, cpus, gpus_milli, memory, started_at in tx.execute(_running)
    ]


def ended_spans(tx: Transaction, *, since: datetime) -> list[tuple[str, UsageSpan]]:
    """Return the queue and usage of every attempt that has ended after `since`."""
    return [
        (queue, UsageSpan(sums(cpus, milli, memory), started_at, ended_at))
        for queue, cpus, milli, memory, started_at, ended_at in tx.execute(
            _ended_in.where(usage.c.ended_at > since)
        )
    ]


def sums(cpus: int, gpus_milli: int, memory_bytes: int) -> ResourceAverages:
    return ResourceAverages(cpus, gpus_milli / WHOLE_GPU, memory_bytes)


# ------------------------------------------------------------------------------------------------ totals


def totals_inside(
    tx: Transaction, by: By, *, since: datetime, until: datetime, workspaces: Sequence[str] | None
) -> Iterator[Any]:
    """Return totals by key and currency over the attempts that started and ended in the time range."""
    key = KEYS[by]
    query = select(
        key.label("key"),
        usage.c.currency,
        func.min(usage.c.workspace).label("workspace"),
        func.count().label("attempts"),
        func.sum(usage.c.gpu_hours).label("gpu_hours"),
        func.sum(usage.c.cpu_hours).label("cpu_hours"),
        func.sum(usage.c.cost).label("cost"),
        func.sum(usage.c.cpu_energy_j).label("cpu_energy_j"),
        func.sum(usage.c.gpu_energy_j).label("gpu_energy_j"),
        func.sum(_unless_measured(usage.c.gpu_energy_j, usage.c.gpu_hours)).label("unmeasured_gpu_hours"),
        func.sum(_unless_measured(usage.c.cpu_energy_j, usage.c.cpu_hours)).label("unmeasured_cpu_hours"),
    ).group_by(key, usage.c.currency)
    inside = usage.c.started_at >= since, usage.c.ended_at <= until
    return iter(tx.execute(_within(query, workspaces).where(*inside)).mappings())


def across(
    tx: Transaction, *, since: datetime, until: datetime, workspaces: Sequence[str] | None
) -> Iterator[Any]:
    """Return the attempts that overlap the time range only in part, or have not ended."""
    overlaps = and_(
        usage.c.started_at < until,
        or_(usage.c.ended_at.is_(None), usage.c.ended_at > since),
        or_(usage.c.ended_at.is_(None), usage.c.ended_at > until, usage.c.started_at < since),
    )
    return iter(tx.execute(_within(select(*_CHARGED), workspaces).where(overlaps)).mappings())


def ended_across(tx: Transaction, workspace: str, moment: datetime) -> Iterator[Any]:
    """Return the attempts of a workspace that started before a moment and ended after it."""
    reaches = usage.c.started_at < moment, usage.c.ended_at > moment, usage.c.workspace == workspace
    return iter(tx.execute(select(*_CHARGED).where(*reaches)).mappings())


def page_between(
    tx: Transaction,
    *,
    since: datetime,
    until: datetime,
    workspaces: Sequence[str] | None = None,
    after: tuple[datetime, str, int] | None = None,
    limit: int,
) -> list[Any]:
    """Return the next page of attempts that overlap the time range, ordered by start."""
    query = _within(select(*_CHARGED), workspaces).where(
        usage.c.started_at < until, or_(usage.c.ended_at.is_(None), usage.c.ended_at > since)
    )
    place = usage.c.started_at, usage.c.job, usage.c.attempt
    if after is not None:
        query = query.where(tuple_(*place) > tuple_(*after, types=[each.type for each in place]))
    return list(tx.execute(query.order_by(*place).limit(limit)).mappings())


# ------------------------------------------------------------------------------------------ replay


def past_attempts(
    database: Database, *, since: datetime, until: datetime, as_of: datetime
) -> Iterator[PastAttempt]:
    """Yield every attempt of the jobs submitted in the time range, oldest first, as known at `as_of`.

    So every read gives the same result. No transaction is held between pages.
    """
    place = usage.c.submitted_at, usage.c.job, usage.c.attempt
    query = select(usage).where(*_submitted(since, until, as_of)).order_by(*place).limit(PAGE)
    page, after = query, None
    while True:
        if after is not None:
            page = query.where(tuple_(*place) > tuple_(*after, types=[each.type for each in place]))
        with database.read() as tx:
            rows = list(tx.execute(page).mappings())
        for row in rows:
            yield _past_attempt(row, as_of)
        if len(rows) < PAGE:
            return
        after = tuple(rows[-1][column.name] for column in place)


def count_past_jobs(tx: Transaction, *, since: datetime, until: datetime, as_of: datetime) -> int:
    """Return the number of jobs that `past_attempts` yields."""
    query = select(func.count(usage.c.job.distinct())).where(*_submitted(since, until, as_of))
    return int(tx.execute(query).scalar_one())


def _submitted(since: datetime, until: datetime, as_of: datetime) -> tuple[ColumnElement[bool], ...]:
    return usage.c.submitted_at >= since, usage.c.submitted_at < until, usage.c.started_at <= as_of


def _past_attempt(row: Any, as_of: datetime) -> PastAttempt:
    over = row["ended_at"] is not None and row["ended_at"] <= as_of
    return PastAttempt(
        job=row["job"],
        attempt=row["attempt"],
        request=Request.model_validate(row["request"]),
        gpu_models=tuple(row["gpu_models"]),
        submitted_at=row["submitted_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"] if over else None,
        verdict=row["verdict"] if over else None,
        borrows=row["borrows"],
    )


def _within(query: Select[Any], workspaces: Sequence[str] | None) -> Select[Any]:
    return query if workspaces is None else query.where(usage.c.workspace.in_(workspaces))


def _unless_measured(energy: ColumnElement[Any], hours: ColumnElement[Any]) -> ColumnElement[Any]:
    return case((energy.is_(None), hours), else_=0.0)
