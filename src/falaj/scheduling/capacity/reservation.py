"""The reservation of the job at the head of the queue, which backfilled jobs must not delay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from falaj.records.scheduling.snapshot import Placement, Request
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.capacity.free_capacity import FreeCapacity
from falaj.scheduling.capacity.resources import Allocation, NodeResources
from falaj.scheduling.placement.gang_placement import capacity, place_gang, placements


class Reservation:
    """The placement of the head, and the time `at` by which it is free (None: unknown).

    `then` is what the head leaves free on its nodes at that time.
    """

    def __init__(
        self, head: Request, at: datetime | None, place: tuple[Placement, ...], then: dict[int, NodeResources]
    ) -> None:
        self.head = head
        self.at = at
        self.place = place
        self.then = then

    def lets_pass(self, request: Request, now: datetime) -> bool:
        """Return whether the job ends before the reservation begins, so that it may use the reserved nodes."""
        return self.at is not None and request.time_limit is not None and now + request.time_limit <= self.at

    def note(self, index: int, slot: NodeResources, held: Allocation) -> None:
        """Count a job that has started and holds `slot` of a node."""
        if index in self.then and (self.at is None or held.ends_by > self.at):
            self.then[index] = self.then[index].take(slot)


def reserve(
    head: Request, capacity_now: FreeCapacity, held: Sequence[Allocation], now: datetime
) -> Reservation | None:
    """Reserve the placement that is free first; None if the head would not fit even with all jobs ended.

    If no end is known, the oldest jobs are assumed to end first, and only those needed. Jobs that start elsewhere are
    younger and not needed, so the next round reserves the same placement.
    """
    cluster = capacity_now.cluster
    permitted = cluster.permitted(head)
    staying = [job for job in held if not job.leaving]
    known = sorted(job for job in staying if job.ends)
    slots, last = capacity_now.after_nominations(), None
    waits_for_jobs = place_gang(head, slots, permitted, cluster) is None
    if waits_for_jobs:
        slots, last = capacity_after(head, slots, known, permitted, cluster)
    at = max(last.ends_by, now) if last else None
    if waits_for_jobs and last is None:
        oldest = sorted(staying, key=lambda job: job.age)
        slots = capacity_after_fewest(head, capacity_now.after_nominations(), oldest, permitted, cluster)
    spots = place_gang(head, slots, permitted, cluster)
    if spots is None:
        return None
    where = placements(head, spots, slots, cluster)
    then: dict[int, NodeResources] = {}
    for index, slot in cluster.slots_of(head, where):
        then[index] = then.get(index, slots[index]).take(slot)
    return Reservation(head, at, where, then)


def capacity_after(
    head: Request,
    slots: list[NodeResources],
    jobs: Iterable[Allocation],
    permitted: Sequence[int],
    cluster: Cluster,
) -> tuple[list[NodeResources], Allocation | None]:
    """Return what is free after ending `jobs` in order until `head` fits, and the last one ended (None: never fits)."""
    replica_counts = ReplicaCounts(head, slots, permitted, cluster)
    for job in jobs:
        for index, slot in job.on:
            replica_counts.give(index, slot)
        if replica_counts.enough and place_gang(head, slots, permitted, cluster) is not None:
            return slots, job
    return slots, None


def capacity_after_fewest(
    head: Request,
    slots: list[NodeResources],
    jobs: Sequence[Allocation],
    permitted: Sequence[int],
    cluster: Cluster,
) -> list[NodeResources]:
    """Return what is free after ending only those of `jobs` that `head` needs, the first ones preferred."""
    slots, last = capacity_after(head, slots, jobs, permitted, cluster)
    if last is None:
        return slots
    replica_counts = ReplicaCounts(head, slots, permitted, cluster)
    for job in reversed(jobs[: jobs.index(last)]):
        for index, slot in job.on:
            replica_counts.take(index, slot)
        if not replica_counts.enough or place_gang(head, slots, permitted, cluster) is None:
            for index, slot in job.on:
                replica_counts.give(index, slot)
    return slots


class ReplicaCounts:
    """How many replicas of a job fit on each node, updated as `slots` change."""

    def __init__(
        self, request: Request, slots: list[NodeResources], permitted: Iterable[int], cluster: Cluster
    ) -> None:
        self.request, self.slots, self.cluster = request, slots, cluster
        self.count = {index: self._count(index) for index in permitted}
        self.missing = request.replicas - sum(self.count.values())

    @property
    def enough(self) -> bool:
        return self.missing <= 0

    def give(self, index: int, slot: NodeResources) -> None:
        self.slots[index] = self.slots[index].give(slot)
        self._recount(index)

    def take(self, index: int, slot: NodeResources) -> None:
        self.slots[index] = self.slots[index].take(slot)
        self._recount(index)

    def _recount(self, index: int) -> None:
        if index in self.count:
            found = self._count(index)
            self.missing -= found - self.count[index]
            self.count[index] = found

    def _count(self, index: int) -> int:
        each = self.request.each
        devices = self.cluster.devices(index, each) if each.gpus else 0
        found = capacity(self.slots[index], each, devices)
        return min(found, 1) if self.request.affinity.spread else found
