"""The room of queues: how the machines are shared out among teams, and what each may spend."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Annotated

from pydantic import AwareDatetime, Field

from falaj.errors import Conflict, InvalidInput
from falaj.governance import objects
from falaj.governance.blobs.service import WorkflowRequests
from falaj.governance.encryption.values import SealedValues
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.ports.metadata import Transaction
from falaj.records.control.workflows import WorkflowRun
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize
from falaj.records.names import ROOT, Name, ObjectId, QueueRef, WorkflowRef, WorkspaceRef
from falaj.records.scheduling.accounting import (
    BudgetChange,
    BudgetState,
    PastAttempt,
    Period,
    QueueChange,
    QueueSettings,
    QueueState,
    Spending,
    Weight,
)
from falaj.records.scheduling.simulation import (
    NO_TIME,
    Changes,
    LengthOfTime,
    WhatIfComparison,
    WhatIfReceipt,
)
from falaj.records.scheduling.snapshot import Queue, Quota
from falaj.scheduling import store, what_if_results
from falaj.scheduling.accounting import budgets as budget_sums
from falaj.scheduling.accounting.accounts import DEFAULT, QueueAccounts
from falaj.scheduling.accounting.attempts import past_attempts
from falaj.scheduling.accounting.queue_states import queue_states, settings_of
from falaj.scheduling.accounting.visibility import visible_workspaces
from falaj.scheduling.dependencies import JobFigures
from falaj.scheduling.queue_tree import require_sound, require_unused
from falaj.scheduling.simulator.history import question_for

WHAT_IF = "queues.what_if"

Version = Annotated[int, Field(ge=0, le=2**31)]


class Queues:
    """Share the machines out among teams: quotas, borrowing, weights and budgets."""

    def __init__(
        self,
        gate: Gate,
        intents: WorkflowRequests,
        *,
        accounts: QueueAccounts,
        jobs: JobFigures,
        sealed: SealedValues,
        wanted: Callable[[], None],
    ) -> None:
        """`wanted` is told when a change may let a job start."""
        self.gate = gate
        self._intents = intents
        self._sealed = sealed
        self._accounts = accounts
        self._jobs = jobs
        self._wanted = wanted

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
        """Make a queue, or set it anew as a whole: what is not said is the default, not what it was.

        With a `version`, only if the queue is still at that one; 0 is one that was never set.
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
        """Remove a queue that has neither jobs nor queues below it."""
        call = current_call()
        name = call.target.name
        if name == DEFAULT:
            raise Conflict(f"queue {DEFAULT} cannot be removed: jobs that name no queue are in it")
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
        """The queues by name and how each stands; for everyone who is in a workspace."""
        found = [each for each in self._standings(current_call()) if each.name > after]
        shown = tuple(found[:limit])
        return Page(items=shown, next=shown[-1].name if len(found) > limit else None)

    @operation("queues.show", resource="queue", mode=Mode.READ, allow="anyone")
    def show(self, queue: QueueRef) -> QueueState:
        """One queue: quota, limit, what is held, borrowed and waits, its share, and whose it is."""
        call = current_call()
        for each in self._standings(call):
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
        """Say what a workspace may spend on jobs in each period; with neither amount its budget is taken away.

        Jobs that run are left alone when it is used up; no more are started. A budget without a period counts from when
        it was first set so.
        """
        call = current_call()
        home = call.object("workspace")
        if home.id == ROOT:
            raise InvalidInput.at("workspace", given=ROOT, allowed="a workspace that has jobs")
        if money is not None and self._accounts.currency is None:
            raise InvalidInput.at(
                "money",
                given=money,
                allowed="a budget in money once there are prices",
                fix="[prices] in falaj.toml",
            )
        store.lock_queues(call.tx)
        earlier = store.budget_of(call.tx, home.id)
        before = None if earlier is None else budget_sums.terms(call.tx, earlier)
        self._changed(call.tx)
        if gpu_hours is None and money is None:
            store.drop_budget(call.tx, home.id)
            return BudgetChange(budget=None, before=before)
        goes_on = earlier is not None and earlier.period == period
        since = earlier.since if earlier is not None and goes_on else call.now
        new = store.StoredBudget(home.id, gpu_hours, money, period, since)
        store.put_budget(call.tx, new)
        return BudgetChange(budget=self._budget_states(call, [new])[0], before=before)

    @operation("queues.budgets", resource="platform", mode=Mode.READ, allow="anyone")
    def budgets(self, *, workspace: WorkspaceRef | None = None) -> tuple[BudgetState, ...]:
        """The budgets of the workspaces that you may see, what was used of each in its period, and what is left."""
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
        """Replay past jobs, those of the last 7 days unless said, under other quotas, limits, weights or machines.

        Both sides of the comparison, which queues.what_if_result reads, are replayed on a virtual clock. An evicted
        job loses what it computed since its last checkpoint; zero: it saves itself when told to go, and loses nothing.
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
        """What a what-if that is done has found: each team's waits, use, preemptions and cost, before and after."""
        return what_if_results.read(self.gate.database, self._sealed, current_call().target)

    @operation("queues.save_what_if", resource="work", mode=Mode.LATE, allow=Role.OPERATOR, internal=True)
    def save_what_if(self, work: WorkflowRef, *, comparison: WhatIfComparison) -> WhatIfReceipt:
        """Keep what a replay has found; the controller does this for whoever asked for it."""
        call = current_call()
        sealed = what_if_results.seal(self._sealed, call.target, comparison)

        def publish() -> WhatIfReceipt:
            what_if_results.keep(call.tx, call.target, sealed)
            return WhatIfReceipt(work=call.target.id, jobs=comparison.jobs)

        return self.gate.commit(call, publish)

    @operation("queues.history", resource="platform", mode=Mode.FREE, allow=Role.OPERATOR)
    def history(
        self, *, since: AwareDatetime, until: AwareDatetime, as_of: AwareDatetime | None = None
    ) -> Iterator[PastAttempt]:
        """Every attempt at the jobs that were submitted in a time, oldest first: what a what-if replays.

        As it was known at the moment `as_of`, so that it is the same whenever it is read.
        """
        known = as_of or current_call().now
        return past_attempts(self.gate.database, since=since, until=until, as_of=known)

    # ------------------------------------------------------------------------------------ beneath them

    def _standings(self, call: Call) -> builtins.list[QueueState]:
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


def _create(call: Call, name: str) -> ObjectId:
    root = objects.resolve(call.tx, ROOT, kind="workspace", workspace=ROOT)
    return call.create("queue", name, workspace=root).id


def _require_version(name: str, earlier: store.StoredQueue | None, wanted: int | None) -> None:
    now = 0 if earlier is None else earlier.version
    if wanted is not None and wanted != now:
        raise Conflict(
            f"queue {name} is at version {now}, not {wanted}: somebody has changed it; look at it again"
        )
