"""Alerts: raised once for a continuing drift, ended by a window without drift, acknowledged by a user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, insert, select, update

from falaj.errors import Conflict, Damaged
from falaj.governance import objects
from falaj.governance.lineage import graph
from falaj.governance.operations import events
from falaj.governance.operations.call import Call
from falaj.governance.tables import objects as objects_table
from falaj.monitoring import store
from falaj.monitoring.tables import alerts
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.models.gates import CheckFinding
from falaj.records.monitoring.monitors import Alert, AlertState
from falaj.records.monitoring.sketches import DriftVerdict, ModelDrift
from falaj.records.names import ObjectId
from falaj.records.registry import ModelVersion


def raise_alert(call: Call, monitor: StoredObject, drift: ModelDrift, facts: dict[str, Any]) -> ObjectId:
    """Create an open alert of `monitor` with its restrictions, and announce it as an event."""
    workspace = objects.by_id(call.tx, monitor.workspace)
    if workspace is None:
        raise Damaged(f"the workspace of monitor {monitor.name} is missing")
    new = call.create("alert", workspace=workspace, zone=monitor.zone)
    graph.flow(call, [monitor], new)
    columns = [report.name for report in drift.drifted]
    row = {
        "id": new.id,
        "monitor": monitor.id,
        "version": drift.model,
        "columns": columns,
        "words": drift.words,
        "since": drift.since,
        "until": drift.until,
        "raised_at": call.now,
        "windows": 1,
        "last_until": drift.until,
        "report": drift.model_dump(mode="json"),
        **facts,
    }
    call.tx.execute(insert(alerts), row)
    store.set_open_alert(call.tx, monitor.id, new.id)
    data = {
        "monitor": monitor.id,
        "name": monitor.name,
        "endpoint": facts["endpoint"],
        "version": drift.model,
        "columns": columns,
    }
    events.announce(call, "monitoring.alert", subject=new, data=data | {"words": drift.words})
    return new.id


def extend_alert(tx: Transaction, ident: str, drift: ModelDrift) -> None:
    """Extend an open alert by another window with drift of its version."""
    mine = alerts.c.id == ident, alerts.c.version == drift.model
    tx.execute(update(alerts).where(*mine).values(windows=alerts.c.windows + 1, last_until=drift.until))


def end_if_resolved(tx: Transaction, ident: str, drift: ModelDrift) -> bool:
    """End an open alert if its version has no drift in this window, or serves nothing while another has no drift."""
    row = _row(tx, ident)
    if drift.verdict is not DriftVerdict.NONE:
        return False
    own = row["version"] == drift.model
    if not own and not store.is_silent(tx, row["endpoint"], row["version"], since=drift.since):
        return False
    tx.execute(update(alerts).where(alerts.c.id == ident).values(ended_at=drift.until))
    store.set_open_alert(tx, row["monitor"], None)
    return True


def acknowledge(call: Call, alert: StoredObject) -> Alert:
    """Acknowledge an alert; if the drift continues, its next window raises a new alert."""
    row = _row(call.tx, alert.id)
    if row["acknowledged_at"] is not None:
        raise Conflict(f"alert {alert.name} was already acknowledged by {row['acknowledged_by']}")
    known = {"acknowledged_by": call.caller.name, "acknowledged_at": call.now}
    call.tx.execute(update(alerts).where(alerts.c.id == alert.id).values(**known))
    if store.open_alert(call.tx, row["monitor"]) == alert.id:
        store.set_open_alert(call.tx, row["monitor"], None)
    return alert_record(call.tx, alert)


def end_open_alert(call: Call, monitor: str) -> None:
    """End the open alert of a monitor, if it has one."""
    ident = store.open_alert(call.tx, monitor)
    if ident is not None:
        call.tx.execute(update(alerts).where(alerts.c.id == ident).values(ended_at=call.now))
        store.set_open_alert(call.tx, monitor, None)


def find_drift(tx: Transaction, version: ModelVersion, endpoints: Sequence[ObjectId]) -> CheckFinding:
    """Return whether a version has an open alert on one of the `endpoints` of its model; alerts name it by number."""
    query = select(alerts.c.id, alerts.c.columns).where(
        alerts.c.version == str(version.number),
        alerts.c.endpoint.in_(endpoints),
        alerts.c.ended_at.is_(None),
        alerts.c.acknowledged_at.is_(None),
    )
    found = tx.execute(query.order_by(alerts.c.id)).all()
    shown = [f"{ident} ({', '.join(columns[:5])})" for ident, columns in found[:10]]
    return CheckFinding(
        passed=not found,
        value=f"open: {', '.join(shown)}" if found else "no open alert",
        allowed=f"no open drift alert of {version.reference}",
        fix=f"look at it, then: falaj monitoring acknowledge {found[0][0]}" if found else "",
    )


def alert_objects(
    tx: Transaction,
    visible: Sequence[ColumnElement[bool]],
    *,
    workspace: str,
    monitor: str | None,
    after: str,
    limit: int,
) -> list[tuple[StoredObject, None]]:
    """Return alerts after `after` that meet the conditions `visible`, ordered by id and so by time."""
    query = select(objects_table).join(alerts, alerts.c.id == objects_table.c.id)
    query = query.where(alerts.c.id > after, objects_table.c.deleted_at.is_(None), *visible)
    query = query.where(
        objects_table.c.workspace == workspace if monitor is None else alerts.c.monitor == monitor
    )
    rows = tx.execute(query.order_by(alerts.c.id).limit(limit)).mappings()
    return [(objects.stored_object(row), None) for row in rows]


def alert_record(tx: Transaction, found: StoredObject, *, with_report: bool = True) -> Alert:
    row = _row(tx, found.id)
    report = row.pop("report")
    return Alert(
        workspace=found.workspace,
        label=found.label,
        state=_state(row),
        columns=tuple(row.pop("columns")),
        report=ModelDrift.model_validate(report) if with_report else None,
        **row,
    )


def _state(row: dict[str, Any]) -> AlertState:
    if row["acknowledged_at"] is not None:
        return AlertState.ACKNOWLEDGED
    return AlertState.OPEN if row["ended_at"] is None else AlertState.ENDED


def _row(tx: Transaction, ident: str) -> dict[str, Any]:
    return dict(tx.execute(select(alerts).where(alerts.c.id == ident)).mappings().one())
