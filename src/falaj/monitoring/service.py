"""The operations of monitoring: watch endpoints for drift from their training sets, and handle alerts."""

from __future__ import annotations

from typing import Annotated

from pydantic import AwareDatetime, Field

from falaj.errors import InvalidInput
from falaj.governance.encryption.values import SealedValues
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_page, visible_page
from falaj.monitoring import alerts as alert_store
from falaj.monitoring import store
from falaj.monitoring.dependencies import MonitoringContext, ReadTrainingSet
from falaj.records.features import DatasetRef
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize
from falaj.records.monitoring.monitors import (
    DEFAULT_ROWS,
    Alert,
    AlertRef,
    ColumnDistribution,
    DriftHistory,
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

EVALUATION_LIMIT = 20
"""Positions that one evaluation handles; the next one handles the rest."""

Columns = Annotated[tuple[Column, ...], Field(min_length=1, max_length=1000)]
WindowCount = Annotated[int, Field(ge=1, le=200)]
BinCount = Annotated[int, Field(ge=2, le=100)]
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
        """Compare the inputs and outputs of an endpoint with a training set, whose sketches are pinned now.

        `columns` of the training set default to all that the endpoint sees, a window to 1000 rows, and the name to
        that of the endpoint. A prediction is compared with the column of its name, or else with the first rows that
        the version served.
        """
        from falaj.monitoring import monitors

        call = current_call()
        return monitors.watch(
            self._context,
            call,
            monitors.MonitoredEndpoint(call.object("endpoint"), reference=call.object("reference")),
            columns=columns,
            window=window or MonitorWindow(rows=DEFAULT_ROWS),
            budget=budget or FalseAlarmBudget(),
            name=name,
            workspace=call.object("workspace"),
        )

    @operation("monitoring.set_reference", resource="monitor", mode=Mode.LATE)
    def set_reference(self, monitor: MonitorRef, *, reference: DatasetRef) -> Monitor:
        """Set another training set as the reference, as after a retraining; an open alert ends."""
        from falaj.monitoring import monitors

        call = current_call()
        return monitors.set_reference(self._context, call, call.object("monitor"), call.object("reference"))

    @operation("monitoring.record", resource="endpoint", allow=Role.OPERATOR, internal=True)
    def record(self, endpoint: WatchedEndpoint, *, windows: Windows) -> WindowReceipt:
        """Ingest windows of sketches of an endpoint; they are stored only if a monitor watches it."""
        from falaj.monitoring.windows.ingestion import ingest_windows

        call = current_call()
        return ingest_windows(self.gate, call, call.object("endpoint"), self._sealed, windows)

    @operation("monitoring.check", resource="monitor", mode=Mode.FREE)
    def check(
        self, monitor: MonitorRef, *, since: AwareDatetime | None = None, until: AwareDatetime | None = None
    ) -> MonitorReport:
        """Report drift since the last complete window, or of that window if too few rows came, or between two times."""
        from falaj.monitoring.reports import check

        if since is not None and until is not None and until <= since:
            raise InvalidInput.at("until", given=until, allowed=f"later than {since.isoformat()}")
        target = current_call().object("monitor")
        return check(self.gate.database, self._sealed, target, since=since, until=until)

    @operation("monitoring.history", resource="monitor", mode=Mode.FREE)
    def history(
        self,
        monitor: MonitorRef,
        *,
        since: AwareDatetime | None = None,
        until: AwareDatetime | None = None,
        windows: WindowCount = 48,
    ) -> DriftHistory:
        """Report the drift of each column in each window that is kept; neighbours are merged into so many windows."""
        from falaj.monitoring.history import MonitorPast

        call = current_call()
        past = MonitorPast(self.gate.database, self._sealed, call.object("monitor"))
        return past.history(since=since, until=until, now=call.now, most=windows)

    @operation("monitoring.distribution", resource="monitor", mode=Mode.FREE, exports=True)
    def distribution(
        self,
        monitor: MonitorRef,
        column: Column,
        *,
        version: Name | None = None,
        since: AwareDatetime | None = None,
        until: AwareDatetime | None = None,
        bins: BinCount = 20,
    ) -> ColumnDistribution:
        """Show the values of a column in the training set and in a time as histograms, from sketches.

        Without a version it is the one that served last.
        """
        from falaj.monitoring.history import MonitorPast

        past = MonitorPast(self.gate.database, self._sealed, current_call().object("monitor"))
        return past.distribution(column, version=version, since=since, until=until, bins=bins)

    @operation("monitoring.evaluate", resource="platform", mode=Mode.LATE, allow=Role.OPERATOR, internal=True)
    def evaluate(self) -> EvaluationSummary:
        """Evaluate every complete window, and raise or end alerts; the controller calls this on its tick.

        If nothing is due, this is a single query and is not audited.
        """
        call = current_call()
        with self.gate.database.read() as tx:
            due = store.due_positions(tx, now=call.now, limit=EVALUATION_LIMIT)
        if not due:
            return EvaluationSummary()
        from falaj.monitoring.evaluation import evaluate

        return evaluate(self.gate, call, self._sealed, due)

    @operation("monitoring.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[Monitor]:
        """List the monitors of a workspace and their progress."""
        call = current_call()
        return list_page(
            self.gate,
            ["monitor"],
            lambda page: [store.monitor_record(call.tx, found) for found in page],
            after=after,
            limit=limit,
            workspace=call.object("workspace").id,
        )

    @operation("monitoring.show", resource="monitor", mode=Mode.READ)
    def show(self, monitor: MonitorRef) -> Monitor:
        """Show a monitor and its progress with each version."""
        call = current_call()
        return store.monitor_record(call.tx, call.object("monitor"))

    @operation("monitoring.remove", resource="monitor", confirm=True)
    def remove(self, monitor: MonitorRef) -> MonitorRemoval:
        """Remove a monitor with its reference and windows; alerts stay."""
        call = current_call()
        target = call.object("monitor")
        alert_store.end_open_alert(call, target.id)
        store.remove_monitor(call.tx, target.id, at=call.now)
        return MonitorRemoval(monitor=target.id)

    @operation("monitoring.alerts", resource="workspace", mode=Mode.READ)
    def alerts(
        self,
        *,
        monitor: MonitorRef | None = None,
        workspace: WorkspaceRef | None = None,
        after: Cursor = "",
        limit: PageSize = 100,
    ) -> Page[Alert]:
        """List the alerts of a workspace or of one monitor, oldest first; monitoring.alert shows their reports."""
        call = current_call()
        only = call.object("monitor") if monitor is not None else None
        home = call.object("workspace").id if only is None else only.workspace
        page = visible_page(
            self.gate,
            lambda visible, position, count: alert_store.alert_objects(
                call.tx,
                [*visible],
                workspace=home,
                monitor=None if only is None else only.id,
                after=position,
                limit=count,
            ),
            after=after,
            limit=limit,
            kinds=["alert"],
            workspace=home,
        )
        items = (alert_store.alert_record(call.tx, each, with_report=False) for each, _ in page.items)
        return Page(items=tuple(items), next=page.next)

    @operation("monitoring.alert", resource="alert", mode=Mode.READ)
    def alert(self, alert: AlertRef) -> Alert:
        """Show an alert with the report of the window that raised it."""
        call = current_call()
        return alert_store.alert_record(call.tx, call.object("alert"))

    @operation("monitoring.acknowledge", resource="alert")
    def acknowledge(self, alert: AlertRef) -> Alert:
        """Acknowledge an alert; if the drift continues, its next window raises a new alert."""
        call = current_call()
        return alert_store.acknowledge(call, call.object("alert"))
