"""The jobs that others are told to leave for: who they are, and what becomes of them."""

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
"""So many jobs at most wait for others to leave: each promise is checked with all others."""

SOLVED_BY_PREEMPTION = (Reason.CAPACITY, Reason.RESERVED, Reason.QUOTA)


class PreemptionClaims:
    """Claims of earlier rounds are honoured first; those that cannot start later in the round may make new ones."""

    def __init__(self, scheduling_round: SchedulingRound) -> None:
        self.scheduling_round = scheduling_round
        self.nominations = Nominations(scheduling_round.capacity_now)
        self._stay: set[str] = set()
        self._told: set[str] = set()
        self._lowest: dict[str, int] = {}
        self._someone_borrows = False
        for held in scheduling_round.held:
            if held.request.preemptible and not held.leaving:
                queue, priority = held.request.queue, held.request.priority
                self._lowest[queue] = min(priority, self._lowest.get(queue, priority))
                self._someone_borrows |= held.borrows

    def stays(self, request: Request) -> None:
        """It is not to be told to leave in this round: it has just started, or it was told already."""
        self._stay.add(request.job)

    def settled(self) -> list[Allocation]:
        """Who runs once those are gone that were told to leave: who stays, and who was promised their places."""
        staying = [each for each in self.scheduling_round.held if each.request.job not in self._told]
        return staying + [self._at_its_place(nomination) for nomination in self.nominations.open]

    # --------------------------------------------------------------------------------------------- honoured

    def each_candidate(self) -> Iterator[Request]:
        """Claims, each at its promised place once that is free: elsewhere it could take what is kept for a head."""
        leaves, nominated = self.scheduling_round.quota_tree.leaves, {}
        for _, request in sorted(
            self.scheduling_round.backlog.claims, key=lambda claim: claim[1].preemptible
        ):
            nominated[request.job] = self._promise(request, leaves.get(request.queue))
        for _, request in self.scheduling_round.backlog.claims:
            nomination = nominated[request.job]
            yield request
            decision = self._take_as_any(request) if nomination is None else self._take(nomination)
            self.scheduling_round.note("", rank(request), (decision,))

    def _promise(self, request: Request, leaf: QuotaNode | None) -> Nomination | None:
        """None where there is no place for it any more: a node is lost, or its queue or its budget was changed.

        It is within its quota if it is beside the jobs that run and the claims before it: those that may not borrow
        come first, then the order is that of ranks. docs/decisions/0012 says why that matters.
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

    def _take(self, nomination: Nomination) -> Decision:
        request, leaf, asked = nomination.request, nomination.leaf, nomination.asked
        allowed = all(branch.limit.holds(branch.all.held, asked) for branch in leaf.path)
        where = self._free_place(request) if allowed else None
        if where is None:
            self._arrives(nomination)
            return Wait(job=request.job, reason=Reason.PREEMPTING)
        start = Start(job=request.job, placements=where, borrows=nomination.borrows)
        self.scheduling_round.hold(request, leaf, asked, start, paid=True)
        self.nominations.drop(nomination)  # only now, or the others would be promised the place that it takes
        return start

    def _free_place(self, request: Request) -> tuple[Placement, ...] | None:
        """Another than the promised one only if those are there now that it keeps away from, or they from it."""
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

    def _take_as_any(self, request: Request) -> Decision:
        leaf, asked = self.scheduling_round.quota_tree.leaves.get(request.queue), requested_amount(request)
        found = self.scheduling_round.judge(request, leaf, asked, shape_of(request))
        if leaf is not None and not isinstance(found, Reason):
            return self.scheduling_round.start(request, leaf, asked, found)
        reason = found if isinstance(found, Reason) else Reason.NO_QUEUE
        if leaf is not None:
            self.scheduling_round.keep_for(request, leaf, asked, reason)
        return Wait(job=request.job, reason=reason)

    # ------------------------------------------------------------------------------------------------- made

    def evict_for(
        self, request: Request, leaf: QuotaNode, asked: ResourceAmount, reason: Reason
    ) -> tuple[Evict, ...]:
        """Those that have to leave so that the job can start; none if it has no right to that, or it would not help."""
        scheduling_round = self.scheduling_round
        if reason not in SOLVED_BY_PREEMPTION or not self._may_hope(request, leaf, asked):
            return ()
        found = victims_for(
            request,
            leaf,
            asked,
            capacity_now=scheduling_round.capacity_now,
            quota_tree=scheduling_round.quota_tree,
            after_nominations=self._stay,
        )
        if not found:
            return ()
        nomination = Nomination(rank(request), request, leaf, asked, found.borrows)
        if not self._can_promise(nomination, [held for held, _ in found.victims]):
            return ()
        for held, _ in found.victims:
            self.stays(held.request)
            self._told.add(held.request.job)
            for branch in scheduling_round.quota_tree.leaves[held.request.queue].path:
                for account in branch.accounts(borrows=held.borrows):
                    account.shift = account.shift.less(held.amount)
        scheduling_round.budget_ledger.spend(request)
        self._arrives(nomination)
        return tuple([Evict(job=held.request.job, by=request.job, why=why) for held, why in found.victims])

    def _may_hope(self, request: Request, leaf: QuotaNode, asked: ResourceAmount) -> bool:
        """A quick look. A job that minds its company evicts nobody: whom it evicts may be whom it wants near."""
        if len(self.nominations.open) >= MAX_NOMINATIONS or self.scheduling_round.group_affinity.matters(
            request
        ):
            return False
        if self._lowest.get(request.queue, request.priority) < request.priority:
            return True
        return self._someone_borrows and leaf.own.leaves(leaf.quota, asked)

    def _can_promise(self, nomination: Nomination, leaving: list[Allocation]) -> bool:
        capacity_now = self.scheduling_round.capacity_now
        before = dict(capacity_now.after_evictions)
        for held in leaving:
            capacity_now.vacate(held)
        if self.nominations.add(nomination):
            return True
        capacity_now.after_evictions = before
        return False

    def _arrives(self, nomination: Nomination) -> None:
        """Whom others want near or apart counts as being there."""
        self.scheduling_round.group_affinity.hold(self._at_its_place(nomination))

    def _at_its_place(self, nomination: Nomination) -> Allocation:
        request, now = nomination.request, self.scheduling_round.now
        on = self.scheduling_round.cluster.slots_of(request, self.nominations.places[request.job])
        return Allocation(
            END_OF_TIME, now, nomination.rank, request, nomination.asked, on, nomination.borrows
        )
