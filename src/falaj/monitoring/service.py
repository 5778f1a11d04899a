"""The room: watch endpoints, take in what they see, and say whether it still looks like the training set."""

from __future__ import annotations

import builtins
from typing import Annotated

from pydantic import AwareDatetime, Field

from falaj.errors import InvalidInput
from falaj.governance.encryption.values import SealedValues
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_workspace_page
from falaj.monitoring import alerts as alert_store
from falaj.monitoring import store
from falaj.monitoring.dependencies import MonitoringContext, ReadTrainingSet
from falaj.records.features import DatasetRef
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.monitoring.monitors import (
    DEFAULT_ROWS,
    Alert,
    AlertRef,
    EvaluationSummary,
    Monitor,
    MonitorRef,
    MonitorRemoval,
    MonitorReport,
    MonitorWindow,
    WatchedEndpoint,
    WindowReceipt,
    WindowRecord,
)
from falaj.records.monitoring.sketches import Column, FalseAlarmBudget
from falaj.records.names import Name, WorkspaceRef

DUE_AT_ONCE = 20
"""Positions that one evaluation takes on; the next one takes the rest."""

Columns = Annotated[tuple[Column, ...], Field(min_length=1, max_length=1000)]
Windows = Annotated[tuple[WindowRecord, ...], Field(min_length=1, max_length=100)]


class Monitoring:
    """Watch endpoints for drift from their training sets."""

    def __init__(self, gate: Gate, *, training_set: ReadTrainingSet, sealed: SealedValues) -> None:
        self.gate = gate
        self._sealed = sealed
        self._context = MonitoringContext(gate, training_set, sealed)

    @operation("monitoring.watch", resource="workspace", mode=Mode.LATE)
    def watch(
        self,
        endpoint: WatchedEndpoint,
        *,
        reference: DatasetRef,
        columns: Columns | None = None,
        window: MonitorWindow | None = None,
        budget: FalseAlarmBudget | None = None,
        name: Name | None = None,
        workspace: WorkspaceRef | None = None,
    ) -> Monitor:
        """Compare what an endpoint sees and answers with a training set, whose sketches are pinned now.

        `columns` of the training set: all that the endpoint sees, unless given. A window is 1000 rows, unless given.
        A prediction is compared with the column of its name, or else with the version's own first rows. Unless it has a
        name, the monitor is called as its endpoint is.
        """
        from falaj.monitoring import monitors

        window, budget = window or MonitorWindow(rows=DEFAULT_ROWS), budget or FalseAlarmBudget()
        return monitors.watch(self._context, current_call(), columns, window, budget, name=name)

    @operation("monitoring.set_reference", resource="monitor", mode=Mode.LATE)
    def set_reference(self, monitor: MonitorRef, *, reference: DatasetRef) -> Monitor:
        """Compare with another training set from now on, as after a retraining; an open alert ends."""
        from falaj.monitoring import monitors

        return monitors.rebase(self._context, current_call())

    @operation("monitoring.record", resource="endpoint", allow=Role.OPERATOR, internal=True)
    def record(self, endpoint: WatchedEndpoint, *, windows: Windows) -> WindowReceipt:
        """Take in windows that a server of the endpoint has sketched; they are kept only if a monitor watches it."""
        from falaj.monitoring.windows.ingestion import ingest_windows

        return ingest_windows(self.gate, current_call(), self._sealed, windows)

    @operation("monitoring.check", resource="monitor", mode=Mode.FREE)
    def check(
        self, monitor: MonitorRef, *, since: AwareDatetime | None = None, until: AwareDatetime | None = None
    ) -> MonitorReport:
        """Look at what came since the last complete window, or that one if too little came, or between two moments."""
        from falaj.monitoring.reports import check

        if since is not None and until is not None and until <= since:
            raise InvalidInput.at("until", given=until, allowed=f"later than {since.isoformat()}")
        target = current_call().target
        return check(self.gate.database, self._sealed, target, since=since, until=until)

    @operation("monitoring.evaluate", resource="platform", mode=Mode.LATE, allow=Role.OPERATOR, internal=True)
    def evaluate(self) -> EvaluationSummary:
        """Judge every window that is complete, and raise or end alerts; the controller does it on its tick.

        Where nothing is due it is one query, and leaves no trace.
        """
        call = current_call()
        with self.gate.database.read() as tx:
            due = store.due_positions(tx, now=call.now, limit=DUE_AT_ONCE)
        if not due:
            return EvaluationSummary()
        from falaj.monitoring.evaluation import evaluate

        return evaluate(self.gate, call, self._sealed, due)

    @operation("monitoring.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[Monitor]:
        """The monitors of a workspace, and how far they are."""
        return list_workspace_page(self.gate, "monitor", store.monitor_record, after=after, limit=limit)

    @operation("monitoring.show", resource="monitor", mode=Mode.READ)
    def show(self, monitor: MonitorRef) -> Monitor:
        """One monitor, and how far it is with each version."""
        return store.monitor_record(current_call().tx, current_call().target)

    @operation("monitoring.remove", resource="monitor", confirm=True)
    def remove(self, monitor: MonitorRef) -> MonitorRemoval:
        """Stop watching; what was pinned and handed in is deleted, alerts stay."""
        call = current_call()
        alert_store.end_open_alert(call, call.target.id)
        store.remove_monitor(call.tx, call.target.id, at=call.now)
        return MonitorRemoval(monitor=call.target.id)

    @operation("monitoring.alerts", resource="workspace", mode=Mode.READ)
    def alerts(
        self,
        *,
        monitor: MonitorRef | None = None,
        workspace: WorkspaceRef | None = None,
        after: Cursor = "",
        limit: PageSize = 100,
    ) -> Page[Alert]:
        """The alerts of a workspace, or of one monitor, oldest first; monitoring.alert has their reports."""
        call = current_call()
        only = call.object("monitor").id if monitor is not None else None
        home = call.target.id
        seen: builtins.list[StoredObject] = []
        while len(seen) <= limit:
            batch = alert_store.alert_objects(
                call.tx, workspace=home, monitor=only, after=after, limit=limit + 1
            )
            seen += self.gate.visible(batch)
            if len(batch) <= limit:
                break
            after = batch[-1].id
        items = tuple(alert_store.alert_record(call.tx, each, with_report=False) for each in seen[:limit])
        return Page(items=items, next=items[-1].id if len(seen) > limit else None)

    @operation("monitoring.alert", resource="alert", mode=Mode.READ)
    def alert(self, alert: AlertRef) -> Alert:
        """One alert, with the report of the window that raised it."""
        return alert_store.alert_record(current_call().tx, current_call().target)

    @operation("monitoring.acknowledge", resource="alert")
    def acknowledge(self, alert: AlertRef) -> Alert:
        """Say that somebody knows; if the drift goes on, its next window raises a new alert."""
        return alert_store.acknowledge(current_call())
