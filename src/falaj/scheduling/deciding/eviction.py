"""Who makes room for a job that has a right to it. docs/decisions/0012 says why this never goes round in a circle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from falaj.records.scheduling.snapshot import Request
from falaj.scheduling.deciding.branches import Branch, Branches
from falaj.scheduling.deciding.ground import Ground
from falaj.scheduling.deciding.ledger import NOTHING, Amount, Held
from falaj.scheduling.deciding.reservation import Rooms
from falaj.scheduling.placing.placement import first, place

Why = Literal["reclaim", "priority"]


class Case(NamedTuple):
    """A job that cannot start, where it belongs, and whether it is going to borrow."""

    request: Request
    leaf: Branch
    asked: Amount
    borrows: bool

    @property
    def key(self) -> tuple[int, int]:
        return (0 if self.borrows else 1), self.request.priority


class Found(NamedTuple):
    """Those that have to leave, and whether the job for which they do will borrow."""

    victims: list[tuple[Held, Why]]
    borrows: bool


def victims_for(
    request: Request, leaf: Branch, asked: Amount, *, ground: Ground, branches: Branches, spared: set[str]
) -> Found | None:
    """Those that have to leave so that the job can start, none in vain; none if that cannot be had.

    First it is tried so that the job ends up within its quota, then so that it borrows. Jobs in `spared` stay.
    """
    for borrowing in (False, True) if request.preemptible else (False,):
        case = Case(request, leaf, asked, borrowing)
        candidates = in_order(
            held
            for held in may_leave(case, branches)
            if held.request.job not in spared and not on_the_heads_nodes(held, ground)
        )
        if candidates:
            trial = Trial(case, ground, branches)
            found = trial.fewest(candidates)
            if found is not None:
                return Found([(held, why(case, held)) for held in found], borrowing)
    return None


def may_leave(case: Case, branches: Branches) -> Iterator[Held]:
    """Jobs of less weight: those below it of its queue, and those that borrow in a branch over its quota."""
    for held in case.leaf.jobs:
        if is_below(held, case.request) and of_less_weight(held, case):
            yield held
    for mine in case.leaf.path:
        for other in mine.parent.children if mine.parent else branches.tops:
            if other is not mine and is_over(other, case.asked):
                for leaf in other.below():
                    yield from (held for held in leaf.jobs if held.borrows and of_less_weight(held, case))


def is_below(held: Held, request: Request) -> bool:
    """Of the same queue: less important; or as important, for a job that may not borrow and has no other way."""
    if request.preemptible:
        return held.request.priority < request.priority
    return held.request.priority <= request.priority


def of_less_weight(held: Held, case: Case) -> bool:
    return not held.leaving and held.request.preemptible and held.key < case.key


def is_over(branch: Branch, asked: Amount, gone: Amount = NOTHING) -> bool:
    """Whether it will hold more than its quota, once some are gone, of something that is asked for."""
    held, quota = branch.all.held.plus(branch.all.shift).less(gone), branch.quota
    return (
        held.cpus > quota.cpus
        or (asked.gpus > 0 and held.gpus > quota.gpus)
        or (asked.memory > 0 and held.memory > quota.memory)
    )


def in_order(candidates: Iterable[Held]) -> list[Held]:
    """The least important first, of these the youngest."""
    return sorted(sorted(candidates, key=lambda held: held.age, reverse=True), key=lambda held: held.key)


def why(case: Case, held: Held) -> Why:
    own = held.request.queue == case.request.queue
    return "priority" if own and held.request.priority < case.request.priority else "reclaim"


def on_the_heads_nodes(held: Held, ground: Ground) -> bool:
    return ground.head is not None and any(index in ground.head.then for index, _ in held.on)


class Trial:
    """What would be free if some jobs left, in the queues and on the nodes."""

    def __init__(self, case: Case, ground: Ground, branches: Branches) -> None:
        self.case, self.branches = case, branches
        self.cluster = ground.cluster
        kept = ground.head.then if ground.head else {}
        self.permitted = [index for index in self.cluster.permitted(case.request) if index not in kept]
        self.rooms = Rooms(case.request, ground.spared(), self.permitted, self.cluster)
        self.gone: dict[str, Amount] = {}
        self.own_gone: dict[str, Amount] = {}  # of those that do not borrow

    def fewest(self, candidates: Sequence[Held]) -> list[Held] | None:
        picked = self._enough(candidates)
        if picked is None:
            return None
        for held in reversed(list(picked)):
            self._stays(held)
            others = [each for each in picked if each is not held]
            if self._fits() and all(self._has_right_to(each) for each in others):
                picked = others
            else:
                self._leaves(held)
        return picked

    def _enough(self, candidates: Sequence[Held]) -> list[Held] | None:
        """Who leaves of its own queue may give it a right to others: these are then looked at once more."""
        picked: list[Held] = []
        for _ in range(2):
            put_off = []
            for held in candidates:
                if not self._helps(held):
                    continue
                if not self._may_go(held):
                    put_off.append(held)
                    continue
                self._leaves(held)
                picked.append(held)
                if self._fits():
                    return picked
            if not picked:
                return None
            candidates = put_off
        return None

    def _helps(self, held: Held) -> bool:
        if any(index in self.rooms.count for index, _ in held.on):
            return True
        theirs = self._path_of(held)
        return any(
            not (self._has_quota(branch) and (self.case.borrows or self._is_within(branch)))
            for branch in self.case.leaf.path
            if branch in theirs
        )

    def _may_go(self, held: Held) -> bool:
        """Of its own queue: as less important, or where with the job more is held than the quota.

        Of another: out of a branch that is over its quota, to a job whose own branches stay within theirs.
        """
        if self._is_own(held):
            less = held.request.priority < self.case.request.priority
            return less or not all(map(self._is_within, self.case.leaf.path))
        theirs = next(branch for branch in reversed(self._path_of(held)) if branch not in self.case.leaf.path)
        gone = self.gone.get(theirs.name, NOTHING)
        return is_over(theirs, self.case.asked, gone) and self._has_right_to(held)

    def _has_right_to(self, held: Held) -> bool:
        """Whether the branches of the job that are not also the other's stay within their quota, all counted."""
        theirs = self._path_of(held)
        return all(self._is_within(branch) for branch in self.case.leaf.path if branch not in theirs)

    def _is_own(self, held: Held) -> bool:
        return self.branches.leaves[held.request.queue] is self.case.leaf

    def _path_of(self, held: Held) -> tuple[Branch, ...]:
        return self.branches.leaves[held.request.queue].path

    def _is_within(self, branch: Branch) -> bool:
        return branch.quota.holds(self._then(branch), self.case.asked)

    def _then(self, branch: Branch) -> Amount:
        return branch.all.then.less(self.gone.get(branch.name, NOTHING))

    def _has_quota(self, branch: Branch) -> bool:
        own = branch.own.then.less(self.own_gone.get(branch.name, NOTHING))
        return branch.limit.holds(self._then(branch), self.case.asked) and (
            self.case.borrows or branch.quota.holds(own, self.case.asked)
        )

    def _fits(self) -> bool:
        if not self.rooms.enough or not all(self._has_quota(branch) for branch in self.case.leaf.path):
            return False
        return place(self.case.request, self.rooms.slots, self.permitted, self.cluster, first) is not None

    def _leaves(self, held: Held) -> None:
        self._count(held, held.amount)
        for index, slot in held.on:
            self.rooms.give(index, slot)

    def _stays(self, held: Held) -> None:
        self._count(held, NOTHING.less(held.amount))
        for index, slot in held.on:
            self.rooms.take(index, slot)

    def _count(self, held: Held, gone: Amount) -> None:
        for branch in self._path_of(held):
            for counted in (self.gone,) if held.borrows else (self.gone, self.own_gone):
                counted[branch.name] = counted.get(branch.name, NOTHING).plus(gone)
