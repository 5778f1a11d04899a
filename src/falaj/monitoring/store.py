"""SQL of monitoring: monitors, window slots and positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, insert, select, update

from falaj.governance import objects
from falaj.monitoring.tables import alerts, monitors, positions, slots
from falaj.monitoring.windows.slots import WindowSlot, due_at
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.monitoring.monitors import Monitor, MonitorWindow, VersionProgress
from falaj.records.monitoring.sketches import DriftVerdict, FalseAlarmBudget
from falaj.records.names import ObjectId

_HOLD = "UPDATE monitoring_endpoints SET seq = seq + ? WHERE endpoint = ? RETURNING seq"
_MARKS = "SELECT monitor, version, judged_seq, rows, waiting_rows FROM monitoring_positions WHERE monitor"
_BEGIN = "INSERT INTO monitoring_endpoints (endpoint, seq) VALUES (?, 0) ON CONFLICT DO NOTHING"

_due = (
    select(
        positions,
        monitors.c.endpoint,
        monitors.c.window,
        monitors.c.budget,
        monitors.c.columns,
        monitors.c.all_columns,
        monitors.c.reference,
    )
    .join(monitors, monitors.c.id == positions.c.monitor)
    .order_by(positions.c.due_at)
)


def add_monitor(tx: Transaction, new: StoredObject, row: dict[str, Any]) -> Monitor:
    tx.execute(insert(monitors), {"id": new.id, **row})
    begin_endpoint(tx, row["endpoint"])
    return monitor_record(tx, new)


def begin_endpoint(tx: Transaction, endpoint: str) -> None:
    tx.execute_sql(_BEGIN + " RETURNING seq", (endpoint,))


def lock_endpoint(tx: Transaction, endpoint: str, *, take: int = 0) -> int | None:
    """Lock the slots of an endpoint, take `take` numbers and return the last number taken."""
    rows = tx.execute_sql(_HOLD, (take, endpoint))
    return int(rows[0][0]) if rows else None


def monitor_row(tx: Transaction, ident: str) -> dict[str, Any]:
    return dict(tx.execute(select(monitors).where(monitors.c.id == ident)).mappings().one())


def monitors_of(tx: Transaction, endpoint: str) -> list[tuple[str, MonitorWindow]]:
    """Return the monitors of an endpoint with their windows."""
    query = select(monitors.c.id, monitors.c.window).where(monitors.c.endpoint == endpoint)
    return [
        (ident, MonitorWindow.model_validate(window))
        for ident, window in tx.execute(query.order_by(monitors.c.id))
    ]


def monitor_record(tx: Transaction, found: StoredObject) -> Monitor:
    row = monitor_row(tx, found.id)
    return Monitor(
        id=found.id,
        workspace=found.workspace,
        name=found.name,
        endpoint=row["endpoint"],
        training_set=row["training_set"],
        reference_rows=row["reference_rows"],
        columns=tuple(row["columns"]),
        all_columns=row["all_columns"],
        window=MonitorWindow.model_validate(row["window"]),
        budget=FalseAlarmBudget.model_validate(row["budget"]),
        label=found.label,
        versions=tuple(_progress(each) for each in positions_of(tx, found.id)),
        alert=row["alert"],
        created_at=found.created_at,
    )


def change_marks(tx: Transaction, idents: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return, for each version that a monitor watches, what differs once rows came or a window was judged."""
    return objects.rows_by_ids(tx, _MARKS, idents)


def remove_monitor(tx: Transaction, ident: ObjectId, *, at: datetime) -> None:
    """Delete a monitor and, with the last one of an endpoint, its slots. Alerts stay."""
    endpoint = monitor_row(tx, ident)["endpoint"]
    lock_endpoint(tx, endpoint)
    tx.execute(delete(positions).where(positions.c.monitor == ident))
    tx.execute(delete(monitors).where(monitors.c.id == ident))
    if not monitors_of(tx, endpoint):
        tx.execute(delete(slots).where(slots.c.endpoint == endpoint))
    objects.delete(tx, ident, at=at)


def replace_reference(tx: Transaction, ident: ObjectId, row: dict[str, Any]) -> None:
    """Replace the reference of a monitor and reset its positions."""
    lock_endpoint(tx, row["endpoint"])
    tx.execute(delete(positions).where(positions.c.monitor == ident))
    tx.execute(update(monitors).where(monitors.c.id == ident).values(**row))


def set_open_alert(tx: Transaction, monitor: str, alert: str | None) -> None:
    tx.execute(update(monitors).where(monitors.c.id == monitor).values(alert=alert))


def open_alert(tx: Transaction, monitor: str) -> str | None:
    found: str | None = tx.execute(select(monitors.c.alert).where(monitors.c.id == monitor)).scalar()
    return found


def open_alert_times(tx: Transaction, endpoint: str) -> list[datetime]:
    """Return the times when the open alerts of an endpoint were raised."""
    query = select(alerts.c.raised_at).join(monitors, monitors.c.alert == alerts.c.id)
    return list(tx.execute(query.where(monitors.c.endpoint == endpoint)).scalars())


# ------------------------------------------------------------------------------------------------ slots


def add_slot(tx: Transaction, endpoint: str, version: str, slot: WindowSlot) -> None:
    row = {
        "seq": slot.seq,
        "since": slot.since,
        "until": slot.until,
        "rows": slot.rows,
        "sealed": slot.sealed,
    }
    tx.execute(insert(slots), {"endpoint": endpoint, "version": version, **row})


def slots_after(tx: Transaction, endpoint: str, version: str, *, seq: int = 0) -> list[WindowSlot]:
    """Return the slots of a version with their sketches, in order of arrival."""
    query = select(slots).where(*_of(endpoint, version), slots.c.seq > seq).order_by(slots.c.seq)
    return [_slot(row) for row in tx.execute(query).mappings()]


def slots_between(
    tx: Transaction, endpoint: str, *, since: datetime | None, until: datetime | None
) -> dict[str, list[WindowSlot]]:
    """Return the slots of every version that overlap a time range."""
    query = select(slots).where(slots.c.endpoint == endpoint).order_by(slots.c.seq)
    query = query if since is None else query.where(slots.c.until > since)
    query = query if until is None else query.where(slots.c.since < until)
    found: dict[str, list[WindowSlot]] = {}
    for row in tx.execute(query).mappings():
        found.setdefault(row["version"], []).append(_slot(row))
    return found


def slot_facts(tx: Transaction, endpoint: str, version: str) -> list[WindowSlot]:
    """Return the slots of a version without their sketches."""
    columns = slots.c.seq, slots.c.since, slots.c.until, slots.c.rows
    query = select(*columns).where(*_of(endpoint, version)).order_by(slots.c.seq)
    return [WindowSlot(*row) for row in tx.execute(query)]


def sealed_slot(tx: Transaction, endpoint: str, version: str, seq: int) -> bytes:
    query = select(slots.c.sealed).where(*_of(endpoint, version), slots.c.seq == seq)
    return bytes(tx.execute(query).scalar_one())


def has_slots(tx: Transaction, endpoint: str, version: str, seqs: Sequence[int]) -> bool:
    """Return whether all these slots still exist: compaction may have merged one with a later one."""
    query = select(func.count()).select_from(slots).where(*_of(endpoint, version), slots.c.seq.in_(seqs))
    return bool(tx.execute(query).scalar_one() == len(set(seqs)))


def is_silent(tx: Transaction, endpoint: str, version: str, *, since: datetime) -> bool:
    """Return whether a version has served nothing since `since`."""
    query = select(slots.c.seq).where(*_of(endpoint, version), slots.c.until > since).limit(1)
    return tx.execute(query).first() is None


def replace_pair(
    tx: Transaction, endpoint: str, version: str, pair: tuple[WindowSlot, WindowSlot], new: WindowSlot
) -> None:
    """Replace two adjacent slots by one."""
    numbers = [slot.seq for slot in pair]
    tx.execute(delete(slots).where(*_of(endpoint, version), slots.c.seq.in_(numbers)))
    add_slot(tx, endpoint, version, new)


# -------------------------------------------------------------------------------------------- positions


def due_positions(tx: Transaction, *, now: datetime, limit: int) -> list[dict[str, Any]]:
    """Return positions with a complete window, joined with their monitors."""
    return [dict(row) for row in tx.execute(_due.where(positions.c.due_at <= now).limit(limit)).mappings()]


def positions_of(tx: Transaction, monitor: str) -> list[dict[str, Any]]:
    query = select(positions).where(positions.c.monitor == monitor).order_by(positions.c.version)
    return [dict(row) for row in tx.execute(query).mappings()]


def judged_seqs(tx: Transaction, monitor_ids: Iterable[str], version: str) -> list[int]:
    """Return the last evaluated slot of each monitor for a version."""
    query = select(positions.c.judged_seq).where(
        positions.c.monitor.in_(list(monitor_ids)), positions.c.version == version
    )
    return list(tx.execute(query).scalars())


def judged_seq_of(tx: Transaction, monitor: str, version: str) -> int | None:
    return next(iter(judged_seqs(tx, [monitor], version)), None)


def begin_position(tx: Transaction, monitor: str, version: str, *, before: int) -> None:
    """Create the position of a monitor for a version after slot `before`, unless it exists."""
    if judged_seq_of(tx, monitor, version) is not None:
        return
    row = {"monitor": monitor, "version": version, "judged_seq": before, "windows": 0, "rows": 0}
    tx.execute(insert(positions), row | {"waiting_rows": 0, "own_columns": []})


def set_position(tx: Transaction, monitor: str, version: str, **values: Any) -> None:
    tx.execute(
        update(positions)
        .where(positions.c.monitor == monitor, positions.c.version == version)
        .values(**values)
    )


def refresh_waiting(
    tx: Transaction, monitor: str, version: str, *, endpoint: str, window: MonitorWindow
) -> None:
    """Update the rows that wait for a monitor's next window of a version, and when it is due."""
    judged = judged_seq_of(tx, monitor, version) or 0
    query = select(func.sum(slots.c.rows), func.min(slots.c.since)).where(
        *_of(endpoint, version), slots.c.seq > judged
    )
    rows, since = tx.execute(query).one()
    due = due_at(int(rows or 0), since, window)
    set_position(tx, monitor, version, waiting_rows=int(rows or 0), waiting_since=since, due_at=due)


def _of(endpoint: str, version: str) -> tuple[Any, ...]:
    return slots.c.endpoint == endpoint, slots.c.version == version


def _slot(row: Any) -> WindowSlot:
    return WindowSlot(row["seq"], row["since"], row["until"], row["rows"], bytes(row["sealed"]))


def _progress(row: dict[str, Any]) -> VersionProgress:
    return VersionProgress(
        version=row["version"],
        windows=row["windows"],
        rows=row["rows"],
        waiting_rows=row["waiting_rows"],
        waiting_since=row["waiting_since"],
        verdict=None if row["verdict"] is None else DriftVerdict(row["verdict"]),
        judged_until=row["judged_until"],
        own_reference=tuple(row["own_columns"]),
    )
