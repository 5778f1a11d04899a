"""Nominations: the placements reserved for jobs for which others are preempted.

Placements are found first-fit, in the order of rank, on what is free once the victims have stopped. What others take
elsewhere does not move them, so a feasible nomination stays feasible.
"""

from __future__ import annotations

from typing import NamedTuple

from falaj.records.scheduling.snapshot import Placement, Request
from falaj.scheduling.capacity.free_capacity import FreeCapacity
from falaj.scheduling.capacity.quota_tree import QuotaNode
from falaj.scheduling.capacity.resources import NOTHING, NodeResources, Rank, ResourceAmount
from falaj.scheduling.placement.gang_placement import by_index, place_gang, placements


class Nomination(NamedTuple):
    """A job that starts when its victims have stopped."""

    rank: Rank
    request: Request
    leaf: QuotaNode
    asked: ResourceAmount
    borrows: bool

    def shift(self, by: ResourceAmount) -> None:
        """Add to what the queue and those above it will hold."""
        for branch in self.leaf.path:
            for account in branch.accounts(borrows=self.borrows):
                account.shift = account.shift.plus(by)


PlacementsByJob = dict[str, tuple[Placement, ...]]


class Nominations:
    """The open nominations and their placements."""

    def __init__(self, capacity_now: FreeCapacity) -> None:
        self.capacity_now = capacity_now
        self.open: list[Nomination] = []
        self.places: PlacementsByJob = {}

    def add(self, nomination: Nomination) -> bool:
        """Add a nomination if it fits beside the others and the head's reservation; return whether it did."""
        wanted = sorted([*self.open, nomination], key=lambda each: each.rank)
        found = self._find(wanted, self.capacity_now.after_leaving())
        if found is None or self._is_reserved(found[0][nomination.request.job]):
            return False
        self._set(wanted, *found)
        nomination.shift(nomination.asked)
        return True

    def drop(self, nomination: Nomination) -> None:
        """Remove the nomination of a job that has started."""
        wanted = [each for each in self.open if each.request.job != nomination.request.job]
        found = self._find(wanted, self.capacity_now.after_leaving())
        self._set(wanted, *(found or ({}, {})))
        nomination.shift(NOTHING.less(nomination.asked))

    def is_free(self, request: Request) -> bool:
        """Return whether the nominated placement is free now."""
        slots: dict[int, NodeResources] = {}
        for index, slot in self.capacity_now.cluster.slots_of(request, self.places[request.job]):
            free = slots.get(index, self.capacity_now.unallocated[index])
            if not free.covers(slot):
                return False
            slots[index] = free.take(slot)
        return True

    def _is_reserved(self, where: tuple[Placement, ...]) -> bool:
        head = self.capacity_now.head
        return head is not None and any(
            self.capacity_now.cluster.index[each.node] in head.then for each in where
        )

    def _set(
        self, nominations: list[Nomination], places: PlacementsByJob, left: dict[int, NodeResources]
    ) -> None:
        self.open, self.places = nominations, places
        self.capacity_now.nomination(left)

    def _find(
        self, nominations: list[Nomination], slots: list[NodeResources]
    ) -> tuple[PlacementsByJob, dict[int, NodeResources]] | None:
        cluster = self.capacity_now.cluster
        places: PlacementsByJob = {}
        touched: dict[int, NodeResources] = {}
        for nomination in nominations:
            request = nomination.request
            spots = place_gang(request, slots, cluster.permitted(request), cluster, by_index)
            if spots is None:
                return None
            where = places[request.job] = placements(request, spots, slots, cluster)
            for index, slot in cluster.slots_of(request, where):
                touched[index] = slots[index] = slots[index].take(slot)
        return places, touched
