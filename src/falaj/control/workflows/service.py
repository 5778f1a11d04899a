"""Operations on work that takes longer than one call, and the queue of intents that the controller takes it from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from falaj.control.workflows import store
from falaj.control.workflows.store import work_record
from falaj.errors import Conflict
from falaj.governance import objects
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_workspace_page
from falaj.governance.record_stream import stream_changes
from falaj.records.control.workflows import WorkflowEnd, WorkflowRun
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize
from falaj.records.names import WorkflowRef, WorkspaceRef


class Workflows:
    """Work that the controller does in the background, whichever operation requested it."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("workflows.show", resource="work", mode=Mode.READ)
    def show(self, work: WorkflowRef) -> WorkflowRun:
        """Show the progress of work, or how it ended."""
        return work_record(current_call().tx, current_call().target)

    @operation("workflows.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[WorkflowRun]:
        """List the work of a workspace, oldest first."""
        return list_workspace_page(
            self.gate,
            "work",
            lambda tx, page: [work_record(tx, each) for each in page],
            after=after,
            limit=limit,
        )

    @operation("workflows.watch", resource="work", mode=Mode.READ)
    def watch(self, work: WorkflowRef) -> Iterator[WorkflowRun]:
        """Stream work at each change until it ends, with heartbeats; the last record says how it ended."""
        target = current_call().target
        return stream_changes(
            self.gate,
            lambda tx: work_record(tx, target),
            has_ended=lambda work: work.state.ended,
        )

    @operation("workflows.cancel", resource="work")
    def cancel(self, work: WorkflowRef) -> WorkflowRun:
        """Stop work before its next step; the effects of finished steps stay."""
        call = current_call()
        found = work_record(call.tx, call.target)
        if found.state.ended:
            raise Conflict(f"work {found.id} has ended already: {found.state}")
        store.request_cancel(call.tx, found.id)
        return found

    @operation("workflows.finish", resource="work", allow=Role.OPERATOR, internal=True, emits=True)
    def finish(self, work: WorkflowRef, *, end: WorkflowEnd) -> WorkflowRun:
        """Record how work ended; the controller calls this."""
        call = current_call()
        found = work_record(call.tx, call.target)
        if found.state.ended:
            raise Conflict(f"work {found.id} has ended already: {found.state}")
        store.end_work(call.tx, found.id, end, now=call.now)
        call.event_data |= {"workflow": found.workflow, "state": end.state}
        return work_record(call.tx, call.target)


class IntentQueue:
    """Stores requested workflows in the transaction of the requesting operation; the controller starts them.

    `pending` is set when there may be work to do: an embedded platform starts its controller then.
    """

    def __init__(self) -> None:
        self.pending = threading.Event()

    def request(self, call: Call, workflow: str, given: dict[str, Any]) -> WorkflowRun:
        """Store the intent to run `workflow` on `given`, on behalf of the caller."""
        home = (
            objects.by_id(call.tx, call.target.workspace) if call.target.kind != "workspace" else call.target
        )
        new = call.create("work", workspace=home or call.target)
        store.add_work(
            call.tx,
            id=new.id,
            workflow=workflow,
            input=given,
            behalf=call.caller.id,
            scope=call.caller.workspace,
            actions=call.caller.actions,
            token=call.caller.token,
        )
        self.pending.set()
        return work_record(call.tx, new)
