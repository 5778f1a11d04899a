"""What is kept for the job at the head, so that nobody who overtakes it makes it start later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from falaj.records.scheduling import Placement, Request
from falaj.scheduling.ledger import Amount, Cluster, Held, Slot, total
from falaj.scheduling.placement import capacity, place, placements


class Reservation:
    """The head's place: where, and the moment from which it is free at the latest (none: unknown).

    `beside` is what a job may take that runs on past that moment: what is free both now and then.
    """

    def __init__(
        self,
        head: Request,
        at: datetime | None,
        place: tuple[Placement, ...],
        now: list[Slot],
        then: list[Slot],
    ) -> None:
        self.head = head
        self.at = at
        self.place = place
        self._then = then
        self.beside = [slot.both(later) for slot, later in zip(now, then, strict=True)]

    def lets_pass(self, request: Request, now: datetime) -> bool:
        """Whether the job is over before the head's moment, so that it may take anything that is free now."""
        return self.at is not None and request.time_limit is not None and now + request.time_limit <= self.at

    def note(self, held: Held, now: Sequence[Slot]) -> None:
        """A job has started, and `now` is what it left."""
        for index, slot in held.on:
            if self.at is None or held.ends_by > self.at:
                self._then[index] = self._then[index].take(slot)
            self.beside[index] = now[index].both(self._then[index])


def reserve(
    head: Request, free: list[Slot], held: Sequence[Held], cluster: Cluster, now: datetime
) -> Reservation:
    """Keep for `head` the place that is free first; `head` fits on the idle cluster, or there would be none.

    Where no moment is known, the oldest jobs are counted as over first: who starts beside the place is younger, so
    the next decision keeps the same place, whatever started meanwhile.
    """
    permitted = cluster.permitted(head.label)
    known = sorted(job for job in held if job.ends)
    slots, last = give_back(head, free, known, permitted)
    at = max(last.ends_by, now) if last else None
    if last is None:
        slots, _ = give_back(head, free, sorted(held, key=lambda job: job.age), permitted)
    spots = place(head, slots, permitted) or []
    where = placements(head, spots, slots, cluster.nodes)
    for index, slot in cluster.slots_of(head, where):
        slots[index] = slots[index].take(slot)
    return Reservation(head, at, where, free, slots)


def give_back(
    head: Request, free: list[Slot], jobs: Iterable[Held], permitted: Sequence[int]
) -> tuple[list[Slot], Held | None]:
    """What is free once `jobs` are over, one by one until `head` fits, and the last of them (none: too few)."""
    slots = list(free)
    rooms = {index: capacity(slots[index], head.each) for index in permitted}
    missing = head.replicas - sum(rooms.values())
    for job in jobs:
        for index, slot in job.on:
            slots[index] = slots[index].give(slot)
            if index in rooms:
                found = capacity(slots[index], head.each)
                missing -= found - rooms[index]
                rooms[index] = found
        if missing <= 0:
            return slots, job
    return slots, None


def quota_beside(first: Request, left: Amount, held: Iterable[Held]) -> Amount:
    """What later jobs of the queue may take while `first` waits for quota: what it can spare, now and then.

    "Then" is when the oldest jobs of the queue are over, as many as it takes.
    """
    asked, then = total(first), left
    for job in sorted((job for job in held if job.queue == first.queue), key=lambda job: job.age):
        if then.covers(asked):
            break
        then = then.plus(job.amount)
    return left.both(then.less(asked))
