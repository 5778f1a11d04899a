"""Queries of the table of work, and its rows as typed records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import bindparam, insert, or_, select, update

from falaj.control import lease
from falaj.control.tables import work
from falaj.governance.operations.idempotency import hold_fence
from falaj.ports.metadata import Prepared, Transaction
from falaj.ports.workflows import JsonObject
from falaj.records.control.workflows import WorkflowEnd, WorkflowRun, WorkflowState
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId

UNFINISHED = (WorkflowState.WAITING, WorkflowState.RUNNING)

_row = select(work).where(work.c.id == bindparam("id"))
_unfinished = Prepared(  # read at every tick of the controller
    select(work).where(or_(*(work.c.state == each.value for each in UNFINISHED))).order_by(work.c.id)
)


@dataclass(frozen=True)
class WorkRow:
    """A row of the table of work; `behalf`, `scope`, `actions` and `token` identify the requester."""

    id: ObjectId
    workflow: str
    input: JsonObject
    behalf: ObjectId
    scope: ObjectId | None
    actions: tuple[str, ...] | None
    token: str | None
    state: WorkflowState
    step: int
    steps: int | None
    doing: str | None
    result: JsonObject | None
    error: str | None
    cancelling: bool
    ended_at: datetime | None


def add_work(tx: Transaction, **values: Any) -> None:
    """Insert work that waits for the controller."""
    tx.execute(insert(work), {"state": WorkflowState.WAITING, "step": 0, "cancelling": False, **values})


def unfinished(tx: Transaction) -> list[WorkRow]:
    """Return the work that waits or runs, oldest first."""
    return [_work_row(each) for each in tx.fetch(_unfinished, {})]


def work_row(tx: Transaction, ident: str) -> WorkRow:
    """Return the row of one piece of work."""
    return _work_row(tx.execute(_row, {"id": ident}).one()._asdict())


def is_unfinished(tx: Transaction, ident: str | None) -> bool:
    """Return whether `ident` is work that waits or runs."""
    query = select(work.c.id).where(work.c.id == ident, work.c.state.in_(UNFINISHED))
    return ident is not None and tx.execute(query).first() is not None


def update_work(tx: Transaction, ident: str, *, fence: int, **values: Any) -> None:
    """Update a row of work; Fenced if another controller has taken over."""
    hold_lease(tx, fence=fence)
    _set(tx, ident, **values)


def hold_lease(tx: Transaction, *, fence: int) -> None:
    """Raise Fenced if another controller has taken over."""
    hold_fence(fence, lease.current_fence(tx))


def end_work(tx: Transaction, ident: str, end: WorkflowEnd, *, now: datetime) -> None:
    """Record the end of work."""
    _set(tx, ident, state=end.state, result=end.result, error=end.error, ended_at=now, doing=None)


def request_cancel(tx: Transaction, ident: str) -> None:
    """Mark work for cancellation."""
    _set(tx, ident, cancelling=True)


def work_record(tx: Transaction, found: StoredObject) -> WorkflowRun:
    """Return the record of one piece of work."""
    row = work_row(tx, found.id)
    return WorkflowRun(
        id=found.id,
        workspace=found.workspace,
        workflow=row.workflow,
        state=row.state,
        step=row.step,
        steps=row.steps,
        doing=row.doing,
        result=row.result,
        error=row.error,
        created_at=found.created_at,
        ended_at=row.ended_at,
    )


def _work_row(row: dict[str, Any]) -> WorkRow:
    actions = None if row["actions"] is None else tuple(row["actions"])
    return WorkRow(**{**row, "state": WorkflowState(row["state"]), "actions": actions})


def _set(tx: Transaction, ident: str, **values: Any) -> None:
    tx.execute(update(work).where(work.c.id == ident).values(**values))
