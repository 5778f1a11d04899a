"""Preemption: jobs with claims of earlier rounds, and new evictions for jobs that cannot start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from falaj.records.scheduling.snapshot import Decision, Evict, Placement, Reason, Request, Start, Wait
from falaj.scheduling.capacity.nominations import Nomination, Nominations
from falaj.scheduling.capacity.quota_tree import QuotaNode
from falaj.scheduling.capacity.resources import (
    END_OF_TIME,
    Allocation,
    ResourceAmount,
    rank,
    requested_amount,
)
from falaj.scheduling.decision.backlog import shape_of
from falaj.scheduling.decision.victims import victims_for
from falaj.scheduling.placement.gang_placement import place_gang, placements

if TYPE_CHECKING:
    from falaj.scheduling.decision.scheduling_round import SchedulingRound

MAX_NOMINATIONS = 32
"""Open nominations at a time; each new one is checked together with all others."""

SOLVED_BY_PREEMPTION = (Reason.CAPACITY, Reason.RESERVED, Reason.QUOTA)


class PreemptionClaims:
    """Serves the claims of earlier rounds first; jobs that cannot start later in the round may make new ones."""

    def __init__(self, scheduling_round: SchedulingRound) -> None:
        self.scheduling_round = scheduling_round
        self.nominations = Nominations(scheduling_round.capacity_now)
        self._excluded: set[str] = set()
        self._evicted: set[str] = set()
        self._lowest: dict[str, int] = {}
        self._someone_borrows = False
        for held in scheduling_round.held:
            if held.request.preemptible and not held.leaving:
                queue, priority = held.request.queue, held.request.priority
                self._lowest[queue] = min(priority, self._lowest.get(queue, priority))
                self._someone_borrows |= held.borrows

    def stays(self, request: Request) -> None:
        """Exclude a job from preemption in this round: it has just started, or is a victim already."""
        self._excluded.add(request.job)

    def settled(self) -> list[Allocation]:
        """Return what is allocated once the victims have stopped and the nominated jobs have started."""
        staying = [each for each in self.scheduling_round.held if each.request.job not in self._evicted]
        return staying + [self._future_allocation(nomination) for nomination in self.nominations.open]

    # --------------------------------------------------------------------------------------------- earlier claims

    def each_candidate(self) -> Iterator[Request]:
        """Yield each claim before its decision. It starts only at its nominated placement, never on a reservation."""
        leaves, nominated = self.scheduling_round.quota_tree.leaves, {}
        for _, request in sorted(
            self.scheduling_round.backlog.claims, key=lambda claim: claim[1].preemptible
        ):
            nominated[request.job] = self._nominate(request, leaves.get(request.queue))
        for _, request in self.scheduling_round.backlog.claims:
            nomination = nominated[request.job]
            yield request
            decision = (
                self._decide_without_nomination(request) if nomination is None else self._decide(nomination)
            )
            self.scheduling_round.note("", rank(request), (decision,))

    def _nominate(self, request: Request, leaf: QuotaNode | None) -> Nomination | None:
        """Nominate a claim; None if it no longer fits, after the loss of a node or a change of its queue or budget.

        It is within quota if it fits beside the running jobs and the claims before it. Claims that may not borrow come
        first, then the order is by rank. docs/decisions/0012 says why that matters.
        """
        if leaf is None or not self.scheduling_round.budget_ledger.can_afford(request):
            return None
        asked = requested_amount(request)
        borrows = not all(each.quota.holds(each.own.then, asked) for each in leaf.path)
        if borrows and not request.preemptible:
            return None
        nomination = Nomination(rank(request), request, leaf, asked, borrows)
        if not all(each.limit.holds(each.all.then, asked) for each in leaf.path):
            return None
        if not self.nominations.add(nomination):
            return None
        self.scheduling_round.budget_ledger.spend(request)
        return nomination

    def _decide(self, nomination: Nomination) -> Decision:
        request, leaf, asked = nomination.request, nomination.leaf, nomination.asked
        allowed = all(branch.limit.holds(branch.all.held, asked) for branch in leaf.path)
        where = self._free_place(request) if allowed else None
        if where is None:
            self._count_for_affinity(nomination)
            return Wait(job=request.job, reason=Reason.PREEMPTING)
        start = Start(job=request.job, placements=where, borrows=nomination.borrows)
        self.scheduling_round.hold(request, leaf, asked, start, paid=True)
        self.nominations.drop(
            nomination
        )  # after the start, or others would be nominated for the same placement
        return start

    def _free_place(self, request: Request) -> tuple[Placement, ...] | None:
        """Return the nominated placement if free; another one only if group affinity now forbids that."""
        scheduling_round = self.scheduling_round
        nodes = scheduling_round.group_affinity.suits(request, scheduling_round.cluster.permitted(request))
        where = self.nominations.places[request.job]
        if {scheduling_round.cluster.index[each.node] for each in where} <= set(nodes):
            return where if self.nominations.is_free(request) else None
        spots = place_gang(request, scheduling_round.capacity_now.free, nodes, scheduling_round.cluster)
        return (
            None
            if spots is None
            else placements(request, spots, scheduling_round.capacity_now.free, scheduling_round.cluster)
        )

    def _decide_without_nomination(self, request: Request) -> Decision:
        leaf, asked = self.scheduling_round.quota_tree.leaves.get(request.queue), requested_amount(request)
        found = self.scheduling_round.judge(request, leaf, asked, shape_of(request))
        if leaf is not None and not isinstance(found, Reason):
            return self.scheduling_round.start(request, leaf, asked, found)
        reason = found if isinstance(found, Reason) else Reason.NO_QUEUE
        if leaf is not None:
            self.scheduling_round.reserve_for(request, leaf, asked, reason)
        return Wait(job=request.job, reason=reason)

    # ------------------------------------------------------------------------------------------------- new claims

    def evict_for(
        self, request: Request, leaf: QuotaNode, asked: ResourceAmount, reason: Reason
    ) -> tuple[Evict, ...]:
        """Return the evictions that let the job start; empty if it has no right to preempt, or that would not help."""
        scheduling_round = self.scheduling_round
        if reason not in SOLVED_BY_PREEMPTION or not self._may_preempt(request, leaf, asked):
            return ()
        found = victims_for(
            request,
            leaf,
            asked,
            capacity_now=scheduling_round.capacity_now,
            quota_tree=scheduling_round.quota_tree,
            excluded=self._excluded,
        )
        if not found:
            return ()
        nomination = Nomination(rank(request), request, leaf, asked, found.borrows)
        if not self._can_nominate(nomination, [held for held, _ in found.victims]):
            return ()
        for held, _ in found.victims:
            self.stays(held.request)
            self._evicted.add(held.request.job)
            for branch in scheduling_round.quota_tree.leaves[held.request.queue].path:
                for account in branch.accounts(borrows=held.borrows):
                    account.shift = account.shift.less(held.amount)
        scheduling_round.budget_ledger.spend(request)
        self._count_for_affinity(nomination)
        return tuple([Evict(job=held.request.job, by=request.job, why=why) for held, why in found.victims])

    def _may_preempt(self, request: Request, leaf: QuotaNode, asked: ResourceAmount) -> bool:
        """Check quickly. A job with group affinity never preempts: its victims may be the jobs that it must be near."""
        if len(self.nominations.open) >= MAX_NOMINATIONS or self.scheduling_round.group_affinity.matters(
            request
        ):
            return False
        if self._lowest.get(request.queue, request.priority) < request.priority:
            return True
        return self._someone_borrows and leaf.own.leaves(leaf.quota, asked)

    def _can_nominate(self, nomination: Nomination, leaving: list[Allocation]) -> bool:
        capacity_now = self.scheduling_round.capacity_now
        before = dict(capacity_now.after_evictions)
        for held in leaving:
            capacity_now.vacate(held)
        if self.nominations.add(nomination):
            return True
        capacity_now.after_evictions = before
        return False

    def _count_for_affinity(self, nomination: Nomination) -> None:
        """Count the nominated job as running on its nodes for group affinity."""
        self.scheduling_round.group_affinity.hold(self._future_allocation(nomination))

    def _future_allocation(self, nomination: Nomination) -> Allocation:
        request, now = nomination.request, self.scheduling_round.now
        on = self.scheduling_round.cluster.slots_of(request, self.nominations.places[request.job])
        return Allocation(
            END_OF_TIME, now, nomination.rank, request, nomination.asked, on, nomination.borrows
        )
