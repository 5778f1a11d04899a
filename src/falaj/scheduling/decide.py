"""Who starts now and who waits: a pure function of a snapshot.

The order is priority, then submission. Each job in its turn starts if its queue's quota and the free nodes that its
residency label permits hold all its replicas. Overtaking has two rules, so that no head starts later because of it:

- The first job that waits for nodes is the head. A place is kept for it: the one that is free first when running jobs
  end by their limits. A later job starts only beside that place, or on it if its time limit ends before the head's
  moment comes. Where that moment is unknown, since it hangs on a job without a limit, the place is the one that the
  jobs that run longest leave, and others start only beside it.
- The first job of a queue that waits for quota keeps that quota. Later jobs of the same queue start only beside it;
  other queues go on, for their quota is their own.

A job that can never start, since it is too large or its data may lie on no node, holds nobody up.
"""

from __future__ import annotations

from collections.abc import Iterable

from falaj.records.scheduling import Decision, Reason, Request, Snapshot, Start, Wait
from falaj.scheduling.ledger import END_OF_TIME, Cluster, Held, Slot, limit, rank, total
from falaj.scheduling.placement import Spot, place, placements
from falaj.scheduling.reservation import Reservation, quota_beside, reserve


def decide(snapshot: Snapshot) -> tuple[Decision, ...]:
    """One decision for each pending job, in the order in which they had their turn."""
    turns = Turns(snapshot)
    return tuple([turns.take(request) for request in in_order(snapshot.pending)])


def in_order(pending: Iterable[Request]) -> list[Request]:
    return sorted(pending, key=rank)


class Turns:
    """One round of decisions. What is free only shrinks in it, so a shape that was refused once stays refused."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.now = snapshot.now
        self.cluster = Cluster(snapshot.nodes)
        self.quotas = {queue.name: limit(queue.quota) for queue in snapshot.queues}
        self.left = dict(self.quotas)
        self.free = list(self.cluster.idle)
        self.held: list[Held] = []
        self.head: Reservation | None = None
        self.quota_heads: dict[str, Request] = {}
        self._refused: dict[tuple[object, ...], Reason] = {}
        for running in snapshot.running:
            self._hold(self.cluster.held_by(running))

    def take(self, request: Request) -> Decision:
        """Decide about the next job, and count what it holds or what is kept for it."""
        shape = shape_of(request)
        reason = self._refused.get(shape)
        if reason is None:
            found = self._find(request)
            if isinstance(found, list):
                return self._start(request, found)
            reason = self._refused[shape] = found
            self._keep_for(request, reason)
        return Wait(job=request.job, reason=reason)

    def judge(self, request: Request) -> list[Spot] | Reason:
        """Where the job can start now, or why it cannot; changes nothing."""
        return self._refused.get(shape_of(request)) or self._find(request)

    def _find(self, request: Request) -> list[Spot] | Reason:
        if request.queue not in self.quotas:
            return Reason.NO_QUEUE
        permitted = self.cluster.permitted(request.label)
        covered = self.left[request.queue].covers(total(request))
        if covered and (spots := place(request, self.open_to(request), permitted)):
            return spots
        if never := self._never(request, permitted):
            return never
        if not covered:
            return Reason.QUOTA
        return Reason.RESERVED if self.head and place(request, self.free, permitted) else Reason.CAPACITY

    def _never(self, request: Request, permitted: list[int]) -> Reason | None:
        """Why the job could not start even if nothing ran."""
        if self.cluster.nodes and not permitted:
            return Reason.RESIDENCY
        if not self.quotas[request.queue].covers(total(request)):
            return Reason.TOO_LARGE
        if place(request, self.cluster.idle, permitted):
            return None
        return Reason.RESIDENCY if place(request, self.cluster.idle, self.cluster.all) else Reason.TOO_LARGE

    def open_to(self, request: Request) -> list[Slot]:
        """What is free for this job, in its turn."""
        if self.head is None or self.head.lets_pass(request, self.now):
            return self.free
        return self.head.beside

    def _start(self, request: Request, spots: list[Spot]) -> Start:
        where = placements(request, spots, self.open_to(request), self.cluster.nodes)
        ends_by = END_OF_TIME if request.time_limit is None else self.now + request.time_limit
        on = self.cluster.slots_of(request, where)
        held = Held(ends_by, self.now, rank(request), request.queue, total(request), on)
        self._hold(held)
        if self.head:
            self.head.note(held, self.free)
        return Start(job=request.job, placements=where)

    def _hold(self, held: Held) -> None:
        self.held.append(held)
        for index, slot in held.on:
            self.free[index] = self.free[index].take(slot)
        if held.queue in self.left:
            self.left[held.queue] = self.left[held.queue].less(held.amount)

    def _keep_for(self, request: Request, reason: Reason) -> None:
        """Keep a place for the first that waits for nodes, and quota for the first of its queue that waits for it."""
        queue = request.queue
        if reason is Reason.CAPACITY and self.head is None:
            self.head = reserve(request, self.free, self.held, self.cluster, self.now)
            self.left[queue] = self.left[queue].less(total(request))
        elif reason is Reason.QUOTA and queue not in self.quota_heads:
            self.quota_heads[queue] = request
            self.left[queue] = quota_beside(request, self.left[queue], self.held)


def shape_of(request: Request) -> tuple[object, ...]:
    """All of a request that decides whether it fits."""
    each = request.each
    return (
        request.queue,
        request.replicas,
        each.cpus,
        each.gpus,
        each.memory_bytes,
        request.label.only,
        request.time_limit,
    )
