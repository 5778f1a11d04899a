"""The jobs that others are told to leave for: who they are, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from falaj.records.scheduling.snapshot import Decision, Evict, Placement, Reason, Request, Start, Wait
from falaj.scheduling.deciding.backlog import shape_of
from falaj.scheduling.deciding.branches import Branch
from falaj.scheduling.deciding.eviction import victims_for
from falaj.scheduling.deciding.ledger import END_OF_TIME, Amount, Held, rank, total
from falaj.scheduling.deciding.promises import Promise, Promises
from falaj.scheduling.placing.placement import place, placements

if TYPE_CHECKING:
    from falaj.scheduling.deciding.turns import Turns

MOST_AT_ONCE = 32
"""So many jobs at most wait for others to leave: each promise is checked with all others."""

PASSES_BY_EVICTION = (Reason.CAPACITY, Reason.RESERVED, Reason.QUOTA)


class Claimants:
    """Claims of earlier rounds are honoured first; those that cannot start later in the round may make new ones."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.promises = Promises(turns.ground)
        self._stay: set[str] = set()
        self._told: set[str] = set()
        self._lowest: dict[str, int] = {}
        self._someone_borrows = False
        for held in turns.held:
            if held.request.preemptible and not held.leaving:
                queue, priority = held.request.queue, held.request.priority
                self._lowest[queue] = min(priority, self._lowest.get(queue, priority))
                self._someone_borrows |= held.borrows

    def stays(self, request: Request) -> None:
        """It is not to be told to leave in this round: it has just started, or it was told already."""
        self._stay.add(request.job)

    def settled(self) -> list[Held]:
        """Who runs once those are gone that were told to leave: who stays, and who was promised their places."""
        staying = [each for each in self.turns.held if each.request.job not in self._told]
        return staying + [self._at_its_place(promise) for promise in self.promises.open]

    # --------------------------------------------------------------------------------------------- honoured

    def each_turn(self) -> Iterator[Request]:
        """Claims, each at its promised place once that is free: elsewhere it could take what is kept for a head."""
        leaves, promised = self.turns.branches.leaves, {}
        for _, request in sorted(self.turns.backlog.claims, key=lambda claim: claim[1].preemptible):
            promised[request.job] = self._promise(request, leaves.get(request.queue))
        for _, request in self.turns.backlog.claims:
            promise = promised[request.job]
            yield request
            decision = self._take_as_any(request) if promise is None else self._take(promise)
            self.turns.note("", rank(request), (decision,))

    def _promise(self, request: Request, leaf: Branch | None) -> Promise | None:
        """None where there is no place for it any more: a node is lost, or its queue or its budget was changed.

        It is within its quota if it is beside the jobs that run and the claims before it: those that may not borrow
        come first, then the order is that of ranks. docs/decisions/0012 says why that matters.
        """
        if leaf is None or not self.turns.purse.affords(request):
            return None
        asked = total(request)
        borrows = not all(each.quota.holds(each.own.then, asked) for each in leaf.path)
        if borrows and not request.preemptible:
            return None
        promise = Promise(rank(request), request, leaf, asked, borrows)
        if not all(each.limit.holds(each.all.then, asked) for each in leaf.path):
            return None
        if not self.promises.add(promise):
            return None
        self.turns.purse.spend(request)
        return promise

    def _take(self, promise: Promise) -> Decision:
        request, leaf, asked = promise.request, promise.leaf, promise.asked
        allowed = all(branch.limit.holds(branch.all.held, asked) for branch in leaf.path)
        where = self._free_place(request) if allowed else None
        if where is None:
            self._arrives(promise)
            return Wait(job=request.job, reason=Reason.PREEMPTING)
        start = Start(job=request.job, placements=where, borrows=promise.borrows)
        self.turns.hold(request, leaf, asked, start, paid=True)
        self.promises.drop(promise)  # only now, or the others would be promised the place that it takes
        return start

    def _free_place(self, request: Request) -> tuple[Placement, ...] | None:
        """Another than the promised one only if those are there now that it keeps away from, or they from it."""
        turns = self.turns
        nodes = turns.company.suits(request, turns.cluster.permitted(request))
        where = self.promises.places[request.job]
        if {turns.cluster.index[each.node] for each in where} <= set(nodes):
            return where if self.promises.is_free(request) else None
        spots = place(request, turns.ground.free, nodes, turns.cluster)
        return None if spots is None else placements(request, spots, turns.ground.free, turns.cluster)

    def _take_as_any(self, request: Request) -> Decision:
        leaf, asked = self.turns.branches.leaves.get(request.queue), total(request)
        found = self.turns.judge(request, leaf, asked, shape_of(request))
        if leaf is not None and not isinstance(found, Reason):
            return self.turns.start(request, leaf, asked, found)
        reason = found if isinstance(found, Reason) else Reason.NO_QUEUE
        if leaf is not None:
            self.turns.keep_for(request, leaf, asked, reason)
        return Wait(job=request.job, reason=reason)

    # ------------------------------------------------------------------------------------------------- made

    def evict_for(self, request: Request, leaf: Branch, asked: Amount, reason: Reason) -> tuple[Evict, ...]:
        """Those that have to leave so that the job can start; none if it has no right to that, or it would not help."""
        turns = self.turns
        if reason not in PASSES_BY_EVICTION or not self._may_hope(request, leaf, asked):
            return ()
        found = victims_for(
            request, leaf, asked, ground=turns.ground, branches=turns.branches, spared=self._stay
        )
        if not found:
            return ()
        promise = Promise(rank(request), request, leaf, asked, found.borrows)
        if not self._can_promise(promise, [held for held, _ in found.victims]):
            return ()
        for held, _ in found.victims:
            self.stays(held.request)
            self._told.add(held.request.job)
            for branch in turns.branches.leaves[held.request.queue].path:
                for account in branch.accounts(borrows=held.borrows):
                    account.shift = account.shift.less(held.amount)
        turns.purse.spend(request)
        self._arrives(promise)
        return tuple([Evict(job=held.request.job, by=request.job, why=why) for held, why in found.victims])

    def _may_hope(self, request: Request, leaf: Branch, asked: Amount) -> bool:
        """A quick look. A job that minds its company evicts nobody: whom it evicts may be whom it wants near."""
        if len(self.promises.open) >= MOST_AT_ONCE or self.turns.company.matters(request):
            return False
        if self._lowest.get(request.queue, request.priority) < request.priority:
            return True
        return self._someone_borrows and leaf.own.leaves(leaf.quota, asked)

    def _can_promise(self, promise: Promise, leaving: list[Held]) -> bool:
        ground = self.turns.ground
        before = dict(ground.vacant)
        for held in leaving:
            ground.vacate(held)
        if self.promises.add(promise):
            return True
        ground.vacant = before
        return False

    def _arrives(self, promise: Promise) -> None:
        """Whom others want near or apart counts as being there."""
        self.turns.company.hold(self._at_its_place(promise))

    def _at_its_place(self, promise: Promise) -> Held:
        request, now = promise.request, self.turns.now
        on = self.turns.cluster.slots_of(request, self.promises.places[request.job])
        return Held(END_OF_TIME, now, promise.rank, request, promise.asked, on, promise.borrows)
