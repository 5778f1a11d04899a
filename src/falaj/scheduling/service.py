"""The services of scheduling: queues with their quotas and budgets, and the usage of jobs."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

from pydantic import AwareDatetime, Field

from falaj.errors import ConfigInvalid, Conflict, InvalidInput
from falaj.governance import objects
from falaj.governance.blobs.service import WorkflowRequests
from falaj.governance.encryption.values import SealedValues
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.caller import Caller
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ByteStream, Mode, operation
from falaj.ports.metadata import Transaction
from falaj.records.control.workflows import WorkflowRun
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import ROOT, Name, ObjectId, QueueRef, WorkflowRef, WorkspaceRef
from falaj.records.scheduling.accounting import (
    BudgetChange,
    BudgetState,
    By,
    PastAttempt,
    Period,
    QueueChange,
    QueueSettings,
    QueueState,
    Spending,
    UsageReport,
    UsageRow,
    Weight,
)
from falaj.records.scheduling.kueue import QueueDrift, QueueSync, QueueSystem, RenderedQueues
from falaj.records.scheduling.simulation import (
    NO_TIME,
    Changes,
    LengthOfTime,
    WhatIfComparison,
    WhatIfReceipt,
)
from falaj.records.scheduling.snapshot import Queue, Quota
from falaj.scheduling import store
from falaj.scheduling.accounting import attempts, focus, reports
from falaj.scheduling.accounting import budgets as budget_sums
from falaj.scheduling.accounting.accounts import DEFAULT, QueueAccounts
from falaj.scheduling.accounting.periods import month_at
from falaj.scheduling.accounting.queue_states import queue_states, settings_of
from falaj.scheduling.dependencies import JobFigures
from falaj.scheduling.kueue.reconcile import QueueReconciler
from falaj.scheduling.kueue.render import SharedQueue
from falaj.scheduling.kueue.sync import KueueCluster
from falaj.scheduling.queue_tree import require_sound, require_unused
from falaj.scheduling.simulator.history import question_for

WHAT_IF = "queues.what_if"

Version = Annotated[int, Field(ge=0, le=2**31)]


WORKSPACES_PER_READ = 500
OVERSEERS = frozenset({Role.OPERATOR, Role.AUDITOR, Role.ADMIN})
"""Roles that see the usage of the whole platform if they are held on it."""


class Queues:
    """Share the cluster among teams: quotas, borrowing, weights and budgets."""

    def __init__(
        self,
        gate: Gate,
        intents: WorkflowRequests,
        *,
        accounts: QueueAccounts,
        jobs: JobFigures,
        sealed: SealedValues,
        wanted: Callable[[], None],
        kueue: KueueCluster | None = None,
        keep: bool = False,
    ) -> None:
        """`wanted` is called when a change may let a job start; `kueue` is none where no cluster is configured.

        With `keep`, the controller keeps its objects as the queues say.
        """
        self.gate = gate
        self._intents = intents
        self._sealed = sealed
        self._accounts = accounts
        self._jobs = jobs
        self._wanted = wanted
        self._systems: dict[QueueSystem, KueueCluster] = {} if kueue is None else {"kueue": kueue}
        self.reconciler: QueueReconciler | None = None
        if kueue is not None and keep:
            self.reconciler = QueueReconciler(kueue, self._shared, self.apply)

    @operation("queues.set", resource="platform", allow=Role.OPERATOR)
    def set(
        self,
        name: Name,
        *,
        quota: Quota = Quota(),  # noqa: B008 - frozen
        limit: Quota | None = None,
        parent: QueueRef | None = None,
        weight: Weight = 1.0,
        workspaces: tuple[WorkspaceRef, ...] = (),
        version: Version | None = None,
    ) -> QueueChange:
        """Create a queue, or replace all its settings: those not given get their defaults.

        With a `version`, only if the queue is still at that version; 0 is a queue that was never set.
        """
        call = current_call()
        store.lock_queues(call.tx)
        known = store.all_queues(call.tx)
        earlier = known.get(name)
        _require_version(name, earlier, version)
        new = Queue(
            name=name,
            quota=quota,
            limit=limit,
            parent=None if parent is None else call.object("parent").name,
            weight=weight,
        )
        require_sound(new, {other: each.queue for other, each in known.items() if other != name})
        before = None if earlier is None else self._settings(call.tx, earlier)
        ident = earlier.id if earlier is not None else _create(call, name)
        allowed = sorted({found.id for found in call.referred["workspaces"]})
        number = (0 if earlier is None else earlier.version) + 1
        store.put_queue(call.tx, ident, new, workspaces=allowed, version=number)
        self._changed(call.tx)
        return QueueChange(queue=self._settings(call.tx, store.all_queues(call.tx)[name]), before=before)

    @operation("queues.remove", resource="queue", allow=Role.OPERATOR, confirm=True)
    def remove(self, queue: QueueRef) -> QueueChange:
        """Remove a queue that has no unfinished jobs and no child queues."""
        call = current_call()
        name = call.target.name
        if name == DEFAULT:
            raise Conflict(f"queue {DEFAULT} cannot be removed: jobs that name no queue use it")
        store.lock_queues(call.tx)
        known = store.all_queues(call.tx)
        if name not in known:
            raise objects.unknown(name, "queue")
        running, waiting = self._jobs.unfinished_in_queues(call.tx).get(name, (0, 0))
        queues = {other: each.queue for other, each in known.items()}
        require_unused(name, queues, running=running, waiting=waiting)
        store.remove_queue(call.tx, known[name].id, at=call.now)
        self._changed(call.tx)
        return QueueChange(queue=None, before=self._settings(call.tx, known[name]))

    @operation("queues.list", resource="platform", mode=Mode.READ, allow="anyone")
    def list(self, *, after: Cursor = "", limit: PageSize = 100) -> Page[QueueState]:
        """List the queues by name with their state; for every member of a workspace."""
        call = current_call()
        last = self.gate.cursors.read(call, after)
        found = [each for each in self._states(call) if each.name > last]
        shown = tuple(found[:limit])
        following = self.gate.cursors.write(call, shown[-1].name) if len(found) > limit else None
        return Page(items=shown, next=following)

    @operation("queues.show", resource="queue", mode=Mode.READ, allow="anyone")
    def show(self, queue: QueueRef) -> QueueState:
        """Show a queue: quota, limit, resources held and borrowed, waiting jobs, share and workspaces."""
        call = current_call()
        for each in self._states(call):
            if each.name == call.target.name:
                return each
        raise objects.unknown(queue, "queue")

    @operation("queues.set_budget", resource="platform", allow=Role.OPERATOR)
    def set_budget(
        self,
        workspace: WorkspaceRef,
        *,
        gpu_hours: Spending | None = None,
        money: Spending | None = None,
        period: Period = "month",
    ) -> BudgetChange:
        """Set what a workspace may spend on jobs in each period; without any amount, remove its budget.

        When it is spent, no more jobs start; running jobs continue. A budget without a period counts from when it was
        first set so.
        """
        call = current_call()
        owner = call.object("workspace")
        if owner.id == ROOT:
            raise InvalidInput.at("workspace", given=ROOT, allowed="a workspace that has jobs")
        if money is not None and self._accounts.currency is None:
            raise InvalidInput.at(
                "money",
                given=money,
                allowed="a budget in money only with prices in the configuration",
                fix="[prices] in falaj.toml",
            )
        store.lock_queues(call.tx)
        earlier = store.budget_of(call.tx, owner.id)
        before = None if earlier is None else budget_sums.terms(call.tx, earlier)
        self._changed(call.tx)
        if gpu_hours is None and money is None:
            store.drop_budget(call.tx, owner.id)
            return BudgetChange(budget=None, before=before)
        goes_on = earlier is not None and earlier.period == period
        since = earlier.since if earlier is not None and goes_on else call.now
        new = store.StoredBudget(owner.id, gpu_hours, money, period, since)
        store.put_budget(call.tx, new)
        return BudgetChange(budget=self._budget_states(call, [new])[0], before=before)

    @operation("queues.budgets", resource="platform", mode=Mode.READ, allow="anyone")
    def budgets(self, *, workspace: WorkspaceRef | None = None) -> tuple[BudgetState, ...]:
        """List the budgets of the workspaces that you may see, with what is used and left in the period."""
        call = current_call()
        seen = {found.id for found in visible_workspaces(self.gate, call.tx, call.caller)}
        if workspace is not None:
            seen &= {call.object("workspace").id}
        found = [each for each in store.all_budgets(call.tx) if each.workspace in seen]
        return tuple(self._budget_states(call, found))

    @operation("queues.what_if", resource="platform", allow=Role.OPERATOR)
    def what_if(
        self,
        *,
        changes: Changes = Changes(),  # noqa: B008 - frozen
        since: AwareDatetime | None = None,
        until: AwareDatetime | None = None,
        checkpoint_every: LengthOfTime = NO_TIME,
    ) -> WorkflowRun:
        """Replay past jobs (by default of the last 7 days) with other quotas, limits, weights or nodes.

        Both sides of the comparison, which queues.what_if_result reads, are replayed on a virtual clock. A preempted
        job loses the work since its last checkpoint; with zero it saves a checkpoint on preemption and loses nothing.
        """
        call = current_call()
        question = question_for(
            call.tx,
            self._accounts,
            changes,
            since=since,
            until=until,
            checkpoint_every=checkpoint_every,
            now=call.now,
        )
        return self._intents.request(call, WHAT_IF, question.model_dump(mode="json"))

    @operation("queues.what_if_result", resource="work", mode=Mode.FREE, allow=Role.OPERATOR)
    def what_if_result(self, work: WorkflowRef) -> WhatIfComparison:
        """Show the result of a finished what-if: waits, usage, preemptions and cost of each team, before and after."""
        return store.read_comparison(self.gate.database, self._sealed, current_call().target)

    @operation("queues.save_what_if", resource="work", mode=Mode.LATE, allow=Role.OPERATOR, internal=True)
    def save_what_if(self, work: WorkflowRef, *, comparison: WhatIfComparison) -> WhatIfReceipt:
        """Store the result of a replay; the controller does this on behalf of the requester."""
        call = current_call()
        sealed = store.seal_comparison(self._sealed, call.target, comparison)

        def publish() -> WhatIfReceipt:
            store.put_comparison(call.tx, call.target, sealed)
            return WhatIfReceipt(work=call.target.id, jobs=comparison.jobs)

        return self.gate.commit(call, publish)

    @operation("queues.history", resource="platform", mode=Mode.FREE, allow=Role.OPERATOR)
    def history(
        self, *, since: AwareDatetime, until: AwareDatetime, as_of: AwareDatetime | None = None
    ) -> Iterator[PastAttempt]:
        """List all attempts of the jobs submitted in a time range, oldest first, as input of a what-if.

        They are returned as they were known at `as_of`, so that every read gives the same result.
        """
        known = as_of or current_call().now
        return attempts.past_attempts(self.gate.database, since=since, until=until, as_of=known)

    @operation("queues.render", resource="platform", mode=Mode.FREE, allow=Role.OPERATOR)
    def render(self, *, to: QueueSystem = "kueue") -> RenderedQueues:
        """Return the queues as objects of Kueue, for the nodes that the cluster has now."""
        return self._cluster(to).render(self._shared())

    @operation("queues.diff", resource="platform", mode=Mode.FREE, allow=Role.OPERATOR)
    def diff(self, *, to: QueueSystem = "kueue") -> QueueDrift:
        """Show how the objects of Kueue in the cluster differ from the queues. Nothing is changed."""
        return self._cluster(to).diff(self._shared())

    @operation("queues.apply", resource="platform", mode=Mode.LATE, allow=Role.OPERATOR)
    def apply(self, *, to: QueueSystem = "kueue") -> QueueSync:
        """Make the objects of Kueue in the cluster as the queues say; objects of others are left alone."""
        call = current_call()
        done = self._cluster(to).apply(self._shared())
        return self.gate.commit(call, lambda: done)

    def _cluster(self, to: QueueSystem) -> KueueCluster:
        found = self._systems.get(to)
        if found is None:
            raise ConfigInvalid.at(
                "kubernetes",
                given="no cluster, or several",
                allowed="one cluster, whose nodes the queues share in Kueue",
                fix='[kubernetes] kubeconfig = "kubeconfig.yaml"',
            )
        return found

    def _shared(self) -> builtins.list[SharedQueue]:
        """Return every queue with the names of the workspaces that may submit to it."""
        with self.gate.database.read() as tx:
            known = store.all_queues(tx)
            names = {str(each.id): each.name for each in all_workspaces(tx)}
        found = {name: (each.queue, each.workspaces) for name, each in known.items()}
        found.setdefault(DEFAULT, (Queue(name=DEFAULT), ()))
        return [
            SharedQueue(queue, tuple(sorted(names[each] for each in (allowed or names) if each in names)))
            for queue, allowed in found.values()
        ]

    def _states(self, call: Call) -> builtins.list[QueueState]:
        seen = visible_workspaces(self.gate, call.tx, call.caller)
        if not seen:
            return []
        names = {str(found.id): found.name for found in seen}
        return queue_states(call.tx, self._accounts, self._jobs, now=call.now, workspaces=names)

    def _settings(self, tx: Transaction, found: store.StoredQueue) -> QueueSettings:
        names = store.names_of(tx, found.workspaces)
        return settings_of(found, [names[ident] for ident in found.workspaces])

    def _budget_states(
        self, call: Call, found: builtins.list[store.StoredBudget]
    ) -> builtins.list[BudgetState]:
        currency = self._accounts.currency
        sums = budget_sums.spent(call.tx, found, now=call.now, currency=currency)
        return [budget_sums.state(call.tx, each, currency=currency) for each in sums]

    def _changed(self, tx: Transaction) -> None:
        self._jobs.queue_changed(tx)
        self._wanted()


class Usage:
    """The usage of jobs: GPU-hours, CPU-hours, energy and cost."""

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
        """Show usage by job, user, workspace or queue in the workspaces that you may see; by default of this month.

        Running jobs count up to now. Operators and auditors of the platform also see removed workspaces.
        """
        call = current_call()
        since, until = _span(since, until, now=call.now)
        within = self._visible_ids(call.tx, call.caller, _named(call, workspace))
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
        """Export usage as CSV with the columns of FOCUS 1.2, the FinOps billing format: one line for each charge."""
        call = current_call()
        since, until = _span(since, until, now=call.now)
        with self.gate.database.read() as tx:
            within = self._visible_ids(tx, call.caller, _named(call, workspace))
        return self._pages(call.caller, since, until, within, now=call.now)

    def _visible_ids(self, tx: Transaction, caller: Caller, only: str | None) -> list[str] | None:
        """Return the ids of the workspaces whose usage the caller may see; None for all, with removed ones."""
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
        self, caller: Caller, since: datetime, until: datetime, within: list[str] | None, *, now: datetime
    ) -> Iterator[bytes]:
        yield focus.header()
        after: tuple[datetime, str, int] | None = None
        while True:
            with self.gate.database.read() as tx:
                rows = attempts.page_between(
                    tx, since=since, until=until, workspaces=within, after=after, limit=attempts.PAGE
                )
                names = store.names_of(tx, [row[of] for row in rows for of in ("workspace", "user_id")])
                names |= self._jobs.names_of_jobs(tx, self._seen_jobs(tx, caller, rows))
            account = focus.BillingAccount(self.gate.audit.log_id, "falaj")
            if rows:
                yield focus.lines(rows, names, account=account, since=since, until=until, now=now)
            if len(rows) < attempts.PAGE:
                return
            last = rows[-1]
            after = last["started_at"], last["job"], last["attempt"]

    def _seen_jobs(self, tx: Transaction, caller: Caller, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the jobs of a page that the caller may know by name; a policy may hide some of a workspace."""
        jobs = list(dict.fromkeys(str(row["job"]) for row in rows))
        if not self.gate.authorizer.state(tx).has_custom:
            return jobs
        found = (objects.ever(tx, each) for each in jobs)
        return [each.id for each in found if each is not None and self.gate.authorizer.sees(tx, caller, each)]


# ------------------------------------------------------------------------------------------ visibility


def visible_workspaces(gate: Gate, tx: Transaction, caller: Caller) -> list[StoredObject]:
    """Return the workspaces that the caller may see, without the platform itself."""
    return [each for each in all_workspaces(tx) if gate.authorizer.sees(tx, caller, each)]


def all_workspaces(tx: Transaction) -> Iterator[StoredObject]:
    """Yield the workspaces, without the platform itself."""
    after = ""
    while True:
        batch = objects.listed(
            tx, kinds=["workspace"], workspace=None, after=after, limit=WORKSPACES_PER_READ
        )
        yield from (each for each in batch if each.id != ROOT)
        if len(batch) < WORKSPACES_PER_READ:
            return
        after = batch[-1].id


def oversees(gate: Gate, tx: Transaction, caller: Caller) -> bool:
    """Return whether the caller may see the usage of all workspaces, also of removed ones."""
    if caller.workspace is not None:
        return False
    person = objects.by_id(tx, caller.id)
    if person is None:
        return False
    held = gate.authorizer.roles(tx, person).roles
    return any(workspace == ROOT and role in OVERSEERS for workspace, role in held)


# ------------------------------------------------------------------------------------------ parameters


def _create(call: Call, name: str) -> ObjectId:
    root = objects.resolve(call.tx, ROOT, kind="workspace", workspace=ROOT)
    return call.create("queue", name, workspace=root).id


def _require_version(name: str, earlier: store.StoredQueue | None, wanted: int | None) -> None:
    now = 0 if earlier is None else earlier.version
    if wanted is not None and wanted != now:
        raise Conflict(
            f"queue {name} is at version {now}, not {wanted}: it was changed meanwhile; read it again"
        )


def _named(call: Call, workspace: str | None) -> str | None:
    return None if workspace is None else call.object("workspace").id


def _span(since: datetime | None, until: datetime | None, *, now: datetime) -> tuple[datetime, datetime]:
    """Return the time range, by default this month; it ends now at the latest."""
    until = min(until or now, now)
    since = since or month_at(until)[0]
    if since > until:
        raise InvalidInput.at(
            "since", given=since.isoformat(), allowed=f"at or before `until`, {until.isoformat()}"
        )
    return since, until
