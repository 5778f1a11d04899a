"""Promises: the places that are kept for jobs that others were told to leave for.

Promised places are found first-fit, job after job in the order of their ranks, on what is free once the leaving are
gone. What others take beside such a place does not move it, so a promise that was possible stays possible.
"""

from __future__ import annotations

from typing import NamedTuple

from falaj.records.scheduling.snapshot import Placement, Request
from falaj.scheduling.deciding.branches import Branch
from falaj.scheduling.deciding.ground import Ground
from falaj.scheduling.deciding.ledger import NOTHING, Amount, Rank, Slot
from falaj.scheduling.placing.placement import first, place, placements


class Promise(NamedTuple):
    rank: Rank
    request: Request
    leaf: Branch
    asked: Amount
    borrows: bool

    def shift(self, by: Amount) -> None:
        """Count what the leaf and those above it will hold."""
        for branch in self.leaf.path:
            for account in branch.accounts(borrows=self.borrows):
                account.shift = account.shift.plus(by)


Places = dict[str, tuple[Placement, ...]]


class Promises:
    """Who was promised what."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.open: list[Promise] = []
        self.places: Places = {}

    def add(self, promise: Promise) -> bool:
        """Whether there is a place for it beside the others and beside the head's; if so it is promised."""
        wanted = sorted([*self.open, promise], key=lambda each: each.rank)
        found = self._find(wanted, self.ground.to_come())
        if found is None or self._is_kept(found[0][promise.request.job]):
            return False
        self._set(wanted, *found)
        promise.shift(promise.asked)
        return True

    def drop(self, promise: Promise) -> None:
        """It has started."""
        wanted = [each for each in self.open if each.request.job != promise.request.job]
        found = self._find(wanted, self.ground.to_come())
        self._set(wanted, *(found or ({}, {})))
        promise.shift(NOTHING.less(promise.asked))

    def is_free(self, request: Request) -> bool:
        """Whether the promised place is free now."""
        slots: dict[int, Slot] = {}
        for index, slot in self.ground.cluster.slots_of(request, self.places[request.job]):
            there = slots.get(index, self.ground.raw[index])
            if not there.covers(slot):
                return False
            slots[index] = there.take(slot)
        return True

    def _is_kept(self, where: tuple[Placement, ...]) -> bool:
        head = self.ground.head
        return head is not None and any(self.ground.cluster.index[each.node] in head.then for each in where)

    def _set(self, promises: list[Promise], places: Places, left: dict[int, Slot]) -> None:
        self.open, self.places = promises, places
        self.ground.promise(left)

    def _find(self, promises: list[Promise], slots: list[Slot]) -> tuple[Places, dict[int, Slot]] | None:
        cluster = self.ground.cluster
        places: Places = {}
        touched: dict[int, Slot] = {}
        for promise in promises:
            request = promise.request
            spots = place(request, slots, cluster.permitted(request), cluster, first)
            if spots is None:
                return None
            where = places[request.job] = placements(request, spots, slots, cluster)
            for index, slot in cluster.slots_of(request, where):
                touched[index] = slots[index] = slots[index].take(slot)
        return places, touched
