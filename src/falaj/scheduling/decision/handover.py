"""Which jobs are handed over to Kueue, which then decides when and where they run: a pure function of a snapshot.

Budgets, residency and all that could never start stay with the platform. A bound on the jobs of a queue that wait in
Kueue keeps a long queue here. It counts only jobs of the same or a higher priority class, so that urgent jobs do not
wait behind others.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

from falaj.records.scheduling.snapshot import PRIORITIES, Reason, Request, Snapshot, priority_class
from falaj.scheduling.capacity.resources import rank, requested_amount
from falaj.scheduling.decision.backlog import Backlog, shape_of
from falaj.scheduling.decision.scheduling_round import SchedulingRound


def hand_over(snapshot: Snapshot, handed_over: Sequence[Request], *, limit: int) -> list[Request]:
    """Return the pending jobs to hand over now, by priority and then submission.

    `handed_over` are the jobs that wait in Kueue already; of each queue and priority class at most `limit` do.
    """
    return HandoverRound(snapshot, handed_over, limit=limit).decide_all()


class HandoverRound:
    """The state of one round: what budgets have left, and the priorities of the jobs in Kueue of each queue."""

    def __init__(self, snapshot: Snapshot, handed_over: Sequence[Request], *, limit: int) -> None:
        self.state = SchedulingRound(snapshot, Backlog())
        self._pending, self._limit = sorted(snapshot.pending, key=rank), limit
        self._waiting: dict[str, list[int]] = {}
        for request in handed_over:
            self._take(request)

    def decide_all(self) -> list[Request]:
        """Return the pending jobs that are handed over."""
        return [request for request in self._pending if self._decide(request)]

    def advance_to(self, job: str) -> Reason | None:
        """Decide on all jobs before `job`; return why it waits, or none if it is handed over."""
        for request in self._pending:
            if request.job == job:
                return self.refusal(request)
            self._decide(request)
        return None

    def ahead(self, request: Request) -> int:
        """Return how many jobs of its queue and of its priority class or a higher one wait in Kueue."""
        return bisect_right(self._waiting.get(request.queue, []), _urgency(request))

    def _decide(self, request: Request) -> bool:
        if self.refusal(request) is not None:
            return False
        self._take(request)
        return True

    def refusal(self, request: Request) -> Reason | None:
        """Return why the job is not handed over now; none if it is."""
        leaf = self.state.quota_tree.leaves.get(request.queue)
        if leaf is None:
            return Reason.NO_QUEUE
        never = self.state.feasibility.never(request, leaf, requested_amount(request), shape_of(request))
        if never is not None:
            return never
        if not self.state.budget_ledger.can_afford(request):
            return Reason.BUDGET
        return Reason.KUEUE if self.ahead(request) >= self._limit else None

    def _take(self, request: Request) -> None:
        self.state.budget_ledger.spend(request)
        insort(self._waiting.setdefault(request.queue, []), _urgency(request))


def _urgency(request: Request) -> int:
    """Return the lower number for the more urgent class."""
    return -PRIORITIES[priority_class(request.priority)]
