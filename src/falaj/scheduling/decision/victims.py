"""Select preemption victims. docs/decisions/0012 says why preemption never cycles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from falaj.records.scheduling.snapshot import Request
from falaj.scheduling.capacity.free_capacity import FreeCapacity
from falaj.scheduling.capacity.quota_tree import QuotaNode, QuotaTree
from falaj.scheduling.capacity.reservation import ReplicaCounts
from falaj.scheduling.capacity.resources import NOTHING, Allocation, ResourceAmount
from falaj.scheduling.placement.gang_placement import by_index, place_gang

Why = Literal["reclaim", "priority"]


class PreemptionCase(NamedTuple):
    """A job that cannot start, its queue, and whether it would borrow."""

    request: Request
    leaf: QuotaNode
    asked: ResourceAmount
    borrows: bool

    @property
    def key(self) -> tuple[int, int]:
        return (0 if self.borrows else 1), self.request.priority


class PreemptionPlan(NamedTuple):
    """The victims, and whether the preempting job will borrow."""

    victims: list[tuple[Allocation, Why]]
    borrows: bool


def victims_for(
    request: Request,
    leaf: QuotaNode,
    asked: ResourceAmount,
    *,
    capacity_now: FreeCapacity,
    quota_tree: QuotaTree,
    excluded: set[str],
) -> PreemptionPlan | None:
    """Return a minimal set of victims that lets the job start; None if there is none.

    First within quota, then borrowing. Jobs in `excluded` are never victims.
    """
    for borrowing in (False, True) if request.preemptible else (False,):
        case = PreemptionCase(request, leaf, asked, borrowing)
        candidates = in_order(
            held
            for held in may_leave(case, quota_tree)
            if held.request.job not in excluded and not on_the_heads_nodes(held, capacity_now)
        )
        if candidates:
            trial = VictimSearch(case, capacity_now, quota_tree)
            found = trial.fewest(candidates)
            if found is not None:
                return PreemptionPlan([(held, why(case, held)) for held in found], borrowing)
    return None


def may_leave(case: PreemptionCase, quota_tree: QuotaTree) -> Iterator[Allocation]:
    """Yield possible victims: less important jobs of its queue, and borrowing jobs of queues over their quota."""
    for held in case.leaf.jobs:
        if is_below(held, case.request) and of_less_weight(held, case):
            yield held
    for mine in case.leaf.path:
        for other in mine.parent.children if mine.parent else quota_tree.tops:
            if other is not mine and is_over(other, case.asked):
                for leaf in other.below():
                    yield from (held for held in leaf.jobs if held.borrows and of_less_weight(held, case))


def is_below(held: Allocation, request: Request) -> bool:
    """Return whether a job of the same queue has a lower priority.

    An equal priority is enough for a preemptor that may not borrow.
    """
    if request.preemptible:
        return held.request.priority < request.priority
    return held.request.priority <= request.priority


def of_less_weight(held: Allocation, case: PreemptionCase) -> bool:
    return not held.leaving and held.request.preemptible and held.key < case.key


def is_over(branch: QuotaNode, asked: ResourceAmount, gone: ResourceAmount = NOTHING) -> bool:
    """Return whether the queue exceeds its quota of a requested resource, after `gone` is freed."""
    held, quota = branch.all.held.plus(branch.all.shift).less(gone), branch.quota
    return (
        held.cpus > quota.cpus
        or (asked.gpus_milli > 0 and held.gpus_milli > quota.gpus_milli)
        or (asked.memory > 0 and held.memory > quota.memory)
    )


def in_order(candidates: Iterable[Allocation]) -> list[Allocation]:
    """Return the candidates in the order of preemption: the least important first, of these the youngest."""
    return sorted(sorted(candidates, key=lambda held: held.age, reverse=True), key=lambda held: held.key)


def why(case: PreemptionCase, held: Allocation) -> Why:
    own = held.request.queue == case.request.queue
    return "priority" if own and held.request.priority < case.request.priority else "reclaim"


def on_the_heads_nodes(held: Allocation, capacity_now: FreeCapacity) -> bool:
    return capacity_now.head is not None and any(index in capacity_now.head.then for index, _ in held.on)


class VictimSearch:
    """What would be free in queues and on nodes if some jobs were preempted."""

    def __init__(self, case: PreemptionCase, capacity_now: FreeCapacity, quota_tree: QuotaTree) -> None:
        self.case, self.quota_tree = case, quota_tree
        self.cluster = capacity_now.cluster
        kept = capacity_now.head.then if capacity_now.head else {}
        self.permitted = [index for index in self.cluster.permitted(case.request) if index not in kept]
        self.replica_counts = ReplicaCounts(
            case.request, capacity_now.after_nominations(), self.permitted, self.cluster
        )
        self.gone: dict[str, ResourceAmount] = {}
        self.own_gone: dict[str, ResourceAmount] = {}  # of those that do not borrow

    def fewest(self, candidates: Sequence[Allocation]) -> list[Allocation] | None:
        picked = self._enough(candidates)
        if picked is None:
            return None
        for held in reversed(list(picked)):
            self._restore(held)
            others = [each for each in picked if each is not held]
            if self._fits() and all(self._has_right_to(each) for each in others):
                picked = others
            else:
                self._evict(held)
        return picked

    def _enough(self, candidates: Sequence[Allocation]) -> list[Allocation] | None:
        """Return victims in order until the job fits.

        Victims of its own queue may give it the right to others, so skipped candidates get a second pass.
        """
        picked: list[Allocation] = []
        for _ in range(2):
            put_off = []
            for held in candidates:
                if not self._helps(held):
                    continue
                if not self._may_evict(held):
                    put_off.append(held)
                    continue
                self._evict(held)
                picked.append(held)
                if self._fits():
                    return picked
            if not picked:
                return None
            candidates = put_off
        return None

    def _helps(self, held: Allocation) -> bool:
        if any(index in self.replica_counts.count for index, _ in held.on):
            return True
        theirs = self._path_of(held)
        return any(
            not (self._has_quota(branch) and (self.case.borrows or self._is_within(branch)))
            for branch in self.case.leaf.path
            if branch in theirs
        )

    def _may_evict(self, held: Allocation) -> bool:
        """Return whether the job may preempt `held`.

        In its own queue: if of lower priority, or if the queue would exceed its quota with the job. In another queue:
        if that exceeds its quota, and the job's own queues stay within theirs.
        """
        if self._is_own(held):
            less = held.request.priority < self.case.request.priority
            return less or not all(map(self._is_within, self.case.leaf.path))
        theirs = next(branch for branch in reversed(self._path_of(held)) if branch not in self.case.leaf.path)
        gone = self.gone.get(theirs.name, NOTHING)
        return is_over(theirs, self.case.asked, gone) and self._has_right_to(held)

    def _has_right_to(self, held: Allocation) -> bool:
        """Return whether the job's queues that are not above `held` stay within quota, counting all their jobs."""
        theirs = self._path_of(held)
        return all(self._is_within(branch) for branch in self.case.leaf.path if branch not in theirs)

    def _is_own(self, held: Allocation) -> bool:
        return self.quota_tree.leaves[held.request.queue] is self.case.leaf

    def _path_of(self, held: Allocation) -> tuple[QuotaNode, ...]:
        return self.quota_tree.leaves[held.request.queue].path

    def _is_within(self, branch: QuotaNode) -> bool:
        return branch.quota.holds(self._then(branch), self.case.asked)

    def _then(self, branch: QuotaNode) -> ResourceAmount:
        return branch.all.then.less(self.gone.get(branch.name, NOTHING))

    def _has_quota(self, branch: QuotaNode) -> bool:
        own = branch.own.then.less(self.own_gone.get(branch.name, NOTHING))
        return branch.limit.holds(self._then(branch), self.case.asked) and (
            self.case.borrows or branch.quota.holds(own, self.case.asked)
        )

    def _fits(self) -> bool:
        if not self.replica_counts.enough or not all(
            self._has_quota(branch) for branch in self.case.leaf.path
        ):
            return False
        return (
            place_gang(self.case.request, self.replica_counts.slots, self.permitted, self.cluster, by_index)
            is not None
        )

    def _evict(self, held: Allocation) -> None:
        self._count(held, held.amount)
        for index, slot in held.on:
            self.replica_counts.give(index, slot)

    def _restore(self, held: Allocation) -> None:
        self._count(held, NOTHING.less(held.amount))
        for index, slot in held.on:
            self.replica_counts.take(index, slot)

    def _count(self, held: Allocation, gone: ResourceAmount) -> None:
        for branch in self._path_of(held):
            for counted in (self.gone,) if held.borrows else (self.gone, self.own_gone):
                counted[branch.name] = counted.get(branch.name, NOTHING).plus(gone)
