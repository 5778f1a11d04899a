"""The room of usage: what jobs have held, what it took and what it cost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from pydantic import AwareDatetime

from falaj.errors import InvalidInput
from falaj.governance import objects
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.caller import Caller
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ByteStream, Mode, operation
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import PageSize
from falaj.records.names import WorkspaceRef
from falaj.records.scheduling.accounting import By, UsageReport, UsageRow
from falaj.scheduling import store
from falaj.scheduling.accounting import attempts, focus, reports
from falaj.scheduling.accounting.accounts import QueueAccounts
from falaj.scheduling.accounting.periods import month_at
from falaj.scheduling.accounting.visibility import oversees, visible_workspaces
from falaj.scheduling.dependencies import JobFigures


class Usage:
    """What jobs have used: GPU-hours, CPU-hours, energy and cost."""

    def __init__(self, gate: Gate, *, accounts: QueueAccounts, jobs: JobFigures) -> None:
        self.gate = gate
        self._accounts = accounts
        self._jobs = jobs

    @operation("usage.show", resource="platform", mode=Mode.READ, allow="anyone")
    def show(
        self,
        *,
        by: By = "workspace",
        since: AwareDatetime | None = None,
        until: AwareDatetime | None = None,
        workspace: WorkspaceRef | None = None,
        limit: PageSize = 100,
    ) -> UsageReport:
        """What was used, by job, user, workspace or queue, in the workspaces that you may see: this month, unless said.

        Running jobs count up to now. Operators and auditors of the platform see workspaces that are gone, too.
        """
        call = current_call()
        since, until = _span(since, until, now=call.now)
        within = self._reach(call.tx, call.caller, _named(call, workspace))
        found = reports.totals(call.tx, by, since=since, until=until, now=call.now, workspaces=within)
        total = reports.UsageTotals()
        for tally in found.values():
            total.add(tally)
        order = reports.most_first(found, self._accounts.currency)
        lines = self._lines(call, by, order[:limit], found)
        return UsageReport(
            by=by,
            since=since,
            until=until,
            lines=lines,
            total=reports.line("total", "total", total, workspace=None),
            left_out=len(found) - len(lines),
        )

    @operation("usage.export", resource="platform", mode=Mode.FREE, allow="anyone")
    def export(
        self,
        *,
        since: AwareDatetime | None = None,
        until: AwareDatetime | None = None,
        workspace: WorkspaceRef | None = None,
    ) -> ByteStream:
        """The same as CSV with the columns of FOCUS 1.2, the open specification of bills: a line for each charge."""
        call = current_call()
        since, until = _span(since, until, now=call.now)
        with self.gate.database.read() as tx:
            within = self._reach(tx, call.caller, _named(call, workspace))
        return self._pages(since, until, within, now=call.now)

    # ------------------------------------------------------------------------------------ beneath them

    def _reach(self, tx: Transaction, caller: Caller, only: str | None) -> list[str] | None:
        """The workspaces whose usage the caller may see; none: all that there were."""
        if only is not None:
            return [only]
        if oversees(self.gate, tx, caller):
            return None
        return [found.id for found in visible_workspaces(self.gate, tx, caller)]

    def _lines(
        self, call: Call, by: By, keys: list[str], found: dict[str, reports.UsageTotals]
    ) -> tuple[UsageRow, ...]:
        tx = call.tx
        if by == "job":
            known = [each for key in keys if (each := objects.ever(tx, key)) is not None]
            keys = [each.id for each in self.gate.visible(known)]
        homes = [home for key in keys if by == "job" and (home := found[key].workspace)]
        names = store.names_of(tx, [*([] if by == "queue" else keys), *homes])
        if by == "job":
            names |= self._jobs.names_of_jobs(tx, keys)
        return tuple(
            reports.line(
                key,
                names.get(key, key),
                found[key],
                workspace=names.get(found[key].workspace or "") if by == "job" else None,
            )
            for key in keys
        )

    def _pages(
        self, since: datetime, until: datetime, within: list[str] | None, *, now: datetime
    ) -> Iterator[bytes]:
        yield focus.header()
        after: tuple[datetime, str, int] | None = None
        while True:
            with self.gate.database.read() as tx:
                rows = attempts.page_between(
                    tx, since=since, until=until, workspaces=within, after=after, limit=attempts.PAGE
                )
                names = store.names_of(tx, [row[of] for row in rows for of in ("workspace", "user_id")])
                names |= self._jobs.names_of_jobs(tx, [row["job"] for row in rows])
            account = focus.BillingAccount(self.gate.audit.log_id, "falaj")
            if rows:
                yield focus.lines(rows, names, account=account, since=since, until=until, now=now)
            if len(rows) < attempts.PAGE:
                return
            last = rows[-1]
            after = last["started_at"], last["job"], last["attempt"]


def _named(call: Call, workspace: str | None) -> str | None:
    return None if workspace is None else call.object("workspace").id


def _span(since: datetime | None, until: datetime | None, *, now: datetime) -> tuple[datetime, datetime]:
    """From when to when: this month up to now, unless said; nothing is known of what is still to come."""
    until = min(until or now, now)
    since = since or month_at(until)[0]
    if since > until:
        raise InvalidInput.at(
            "since", given=since.isoformat(), allowed=f"at or before {until.isoformat()}, where it ends"
        )
    return since, until
