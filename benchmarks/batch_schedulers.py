"""Schedulers as they are commonly found, for comparison on the same clock: first come first served, and EASY.

Both know one order, that of submission, and neither queues, quotas nor priorities. They see CPUs, memory, and GPUs by
model, whole or in parts; labels, affinity and slices they do not. Places are found as by best-fit: of the nodes that
will do, the one with the fewest free GPUs, then CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from falaj.records.scheduling.snapshot import Decision, Reason, Request, Snapshot, Start, Wait
from node_capacity import FreeNodes, FreePlace, placements


def first_come_first_served(snapshot: Snapshot) -> tuple[Decision, ...]:
    """Nobody overtakes the first job that has to wait."""
    return tuple(BatchRound(snapshot, overtaking=False).decisions())


def easy_backfill(snapshot: Snapshot) -> tuple[Decision, ...]:
    """Who does not delay the first job that has to wait may overtake it (EASY, as on most batch systems).

    The first gets a place: where running jobs, by their limits, let it start soonest. Others start beside that place,
    or on it if their own limits end before that. Where no moment is known nobody overtakes.
    """
    return tuple(BatchRound(snapshot, overtaking=True).decisions())


class BatchRound:
    def __init__(self, snapshot: Snapshot, *, overtaking: bool) -> None:
        self.snapshot, self.overtaking = snapshot, overtaking
        self.free = FreeNodes(snapshot.nodes)
        self.idle = FreeNodes(snapshot.nodes)
        for running in snapshot.running:
            self.free.take_all(running.request.each, self.free.places_of(running.placements))
        self.head: Request | None = None
        self.at: datetime | None = None
        self.then, self.beside = FreeNodes(()), FreeNodes(())
        self.refused: set[tuple[object, ...]] = set()

    def decisions(self) -> Iterator[Decision]:
        for request in sorted(self.snapshot.pending, key=lambda each: (each.submitted_at, each.job)):
            yield self._decide(request)

    def _decide(self, request: Request) -> Decision:
        found: Sequence[FreePlace] | None = None
        if self.head is None:
            found = self.free.place(request)
            if found is None and self.idle.place(request) is None:
                return Wait(job=request.job, reason=Reason.TOO_LARGE)
            if found is None:
                self._wait_for(request)
        elif self.at is not None:
            found = self._overtake(request, self.at)
        if found is None:
            return Wait(job=request.job, reason=Reason.CAPACITY)
        self._start(request, found)
        return Start(job=request.job, placements=placements(found, self.snapshot.nodes))

    def _wait_for(self, head: Request) -> None:
        """Keep the place where `head` starts soonest."""
        self.head = head
        if not self.overtaking:
            return
        then = self.free.copy()
        ends = [(each.ends_by, each.request.job, each) for each in self.snapshot.running if each.ends_by]
        for ends_by, _, running in sorted(ends, key=lambda each: each[:2]):
            then.give_all(running.request.each, then.places_of(running.placements))
            found = then.place(head)
            if found is not None:
                then.take_all(head.each, found)
                self.at, self.then = max(ends_by, self.snapshot.now), then
                self.beside = self.free.both(then)
                return

    def _overtake(self, request: Request, at: datetime) -> Sequence[FreePlace] | None:
        """What was refused once stays refused in this round: what is free only shrinks."""
        soon = self._ends_by(request, at)
        shape = (soon, request.each, request.replicas)
        if shape in self.refused:
            return None
        found = (self.free if soon else self.beside).place(request)
        if found is None:
            self.refused.add(shape)
        return found

    def _start(self, request: Request, found: Sequence[FreePlace]) -> None:
        self.free.take_all(request.each, found)
        if self.at is not None:
            if not self._ends_by(request, self.at):
                self.then.take_all(request.each, found)
            self.beside.refresh(found, self.free, self.then)

    def _ends_by(self, request: Request, at: datetime) -> bool:
        return request.time_limit is not None and self.snapshot.now + request.time_limit <= at
