"""The stored usage history of each queue, updated as attempts end."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta

from sqlalchemy import bindparam, delete, insert, select, update

from falaj.ports.metadata import Transaction, from_micros, to_micros
from falaj.scheduling.accounting.attempts import ended_spans
from falaj.scheduling.accounting.decayed_usage import (
    HALF_LIVES_KEPT,
    ResourceAverages,
    UsageSpan,
    averaged,
    decay_factor,
    weight_of,
)
from falaj.scheduling.tables import history

_ALL = "SELECT queue, half_life_s, as_of, cpus, gpus, memory_bytes FROM scheduling_history"
_of_queue = select(history).where(history.c.queue == bindparam("of")).with_for_update()
_renew = update(history).where(history.c.queue == bindparam("of"))


def ended_averages(tx: Transaction, *, now: datetime, half_life: timedelta) -> dict[str, ResourceAverages]:
    """Return the decayed average usage of the ended attempts of each queue."""
    rows = tx.execute_sql(_ALL)
    if any(row[1] != half_life.total_seconds() for row in rows):  # the configuration has changed
        return _recompute(tx, now=now, half_life=half_life)
    return {
        queue: ResourceAverages(*sums).times(decay_factor(from_micros(as_of), now=now, half_life=half_life))
        for queue, _, as_of, *sums in rows
    }


def add_ended(tx: Transaction, queue: str, ended: UsageSpan, *, now: datetime, half_life: timedelta) -> None:
    """Add an attempt that ends now; its row has its end already."""
    row = tx.execute(_of_queue, {"of": queue}).mappings().first()
    if row is not None and row["half_life_s"] != half_life.total_seconds():
        _rebuild(tx, now=now, half_life=half_life)
        return
    weight = weight_of(ended.start, ended.end or now, now=now, half_life=half_life)
    total = ended.held.times(weight)
    if row is None:
        tx.execute(insert(history), _columns(queue, total, now=now, half_life=half_life))
        return
    kept = ResourceAverages(row["cpus"], row["gpus"], row["memory_bytes"])
    total = total.plus(kept.times(decay_factor(row["as_of"], now=now, half_life=half_life)))
    tx.execute(_renew.values(as_of=now, **total._asdict()), {"of": queue})


def _rebuild(tx: Transaction, *, now: datetime, half_life: timedelta) -> None:
    """Recompute the history of every queue after a change of the half-life."""
    tx.execute(delete(history))
    for queue, total in _recompute(tx, now=now, half_life=half_life).items():
        tx.execute(insert(history), _columns(queue, total, now=now, half_life=half_life))


def _recompute(tx: Transaction, *, now: datetime, half_life: timedelta) -> dict[str, ResourceAverages]:
    past: defaultdict[str, list[UsageSpan]] = defaultdict(list)
    for queue, span in ended_spans(tx, since=_history_start(now, half_life)):
        past[queue].append(span)
    return {queue: averaged(each, now=now, half_life=half_life) for queue, each in past.items()}


def _history_start(now: datetime, half_life: timedelta) -> datetime:
    return from_micros(max(to_micros(now) - int(HALF_LIVES_KEPT * half_life.total_seconds() * 1e6), 0))


def _columns(
    queue: str, total: ResourceAverages, *, now: datetime, half_life: timedelta
) -> dict[str, object]:
    return {"queue": queue, "half_life_s": half_life.total_seconds(), "as_of": now, **total._asdict()}
