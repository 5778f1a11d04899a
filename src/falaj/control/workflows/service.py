"""Work: what was asked for and takes longer than an answer. Watch it, wait for it, cancel it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from sqlalchemy import bindparam, insert, select, update

from falaj.control import lease
from falaj.control.tables import work
from falaj.errors import Conflict
from falaj.governance import objects
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.idempotency import hold_fence
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_workspace_page
from falaj.ports.metadata import Transaction
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import WorkflowRef, WorkspaceRef

WATCH_EVERY_S = 0.1
ALIVE_EVERY_S = 2.0
"""So often a watcher hears something: one that is gone is noticed by then."""

_row = select(work).where(work.c.id == bindparam("id"))
_unfinished = (
    select(work).where(work.c.state.in_([WorkflowState.WAITING, WorkflowState.RUNNING])).order_by(work.c.id)
)


class WorkService:
    """Long work, wherever it was asked for."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("workflows.show", resource="work", mode=Mode.READ)
    def show(self, work: WorkflowRef) -> WorkflowRun:
        """How far it is, or how it ended."""
        return work_record(current_call().tx, current_call().target)

    @operation("workflows.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[WorkflowRun]:
        """The work of a workspace, oldest first."""
        return list_workspace_page(self.gate, "work", work_record, after=after, limit=limit)

    @operation("workflows.watch", resource="work", mode=Mode.READ)
    def watch(self, work: WorkflowRef) -> Iterator[WorkflowRun]:
        """Every change until it ends, and a sign of life now and then; the last record says how it ended."""
        return self._changes(current_call().target)

    @operation("workflows.cancel", resource="work")
    def cancel(self, work: WorkflowRef) -> WorkflowRun:
        """Stop it before its next step; what its steps have done stays."""
        call = current_call()
        found = work_record(call.tx, call.target)
        if found.state.ended:
            raise Conflict(f"work {found.id} has ended already: {found.state}")
        _set(call.tx, found.id, cancelling=True)
        return found

    def _changes(self, target: StoredObject) -> Iterator[WorkflowRun]:
        last, said_at = None, 0.0
        while last is None or not last.state.ended:
            with self.gate.database.read() as tx:
                now = work_record(tx, target)
            if now != last or time.monotonic() - said_at >= ALIVE_EVERY_S:
                said_at = time.monotonic()
                yield now
            else:
                time.sleep(WATCH_EVERY_S)
            last = now


class IntentQueue:
    """Writes down what is wanted, in the transaction of the operation that wants it; the controller takes it up.

    `pending` is set when there may be work to do: an embedded platform starts its controller then.
    """

    def __init__(self) -> None:
        self.pending = threading.Event()

    def request(self, call: Call, workflow: str, given: dict[str, Any]) -> WorkflowRun:
        home = (
            objects.by_id(call.tx, call.target.workspace) if call.target.kind != "workspace" else call.target
        )
        new = call.create("work", workspace=home or call.target)
        row = {
            "id": new.id,
            "workflow": workflow,
            "input": given,
            "behalf": call.caller.id,
            "scope": call.caller.workspace,
            "actions": call.caller.actions,
            "token": call.caller.token,
            "state": WorkflowState.WAITING,
            "step": 0,
            "cancelling": False,
        }
        call.tx.execute(insert(work), row)
        self.pending.set()
        return work_record(call.tx, new)


def unfinished(tx: Transaction) -> list[Any]:
    """The rows that the controller has to look after."""
    return list(tx.execute(_unfinished).mappings())


def by_id(tx: Transaction, ident: str) -> Any:
    return tx.execute(_row, {"id": ident}).mappings().one()


def note(tx: Transaction, ident: str, *, fence: int, **values: Any) -> None:
    """Write down progress, unless another controller has taken over."""
    hold_fence(fence, lease.current_fence(tx))
    _set(tx, ident, **values)


def end(
    tx: Transaction, ident: str, *, fence: int, state: WorkflowState, now: datetime, **values: Any
) -> None:
    note(tx, ident, fence=fence, state=state, ended_at=now, doing=None, **values)


def work_record(tx: Transaction, found: StoredObject) -> WorkflowRun:
    row = by_id(tx, found.id)
    return WorkflowRun(
        id=found.id,
        workspace=found.workspace,
        workflow=row["workflow"],
        state=WorkflowState(row["state"]),
        step=row["step"],
        steps=row["steps"],
        doing=row["doing"],
        result=row["result"],
        error=row["error"],
        created_at=found.created_at,
        ended_at=row["ended_at"],
    )


def _set(tx: Transaction, ident: str, **values: Any) -> None:
    tx.execute(update(work).where(work.c.id == ident).values(**values))
