"""Baseline batch schedulers for the simulator: first come first served, and EASY backfill.

Both order jobs by submission and ignore queues, quotas, priorities, labels, affinity and MIG slices. Placement is best
fit: the node with the fewest free GPUs, then CPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from falaj.records.scheduling.snapshot import (
    WHOLE_GPU,
    Decision,
    Node,
    Placement,
    Reason,
    Request,
    Resources,
    Snapshot,
    Start,
    Wait,
)
from falaj.scheduling.placement.fleet import GpuAssignment


def first_come_first_served(snapshot: Snapshot) -> tuple[Decision, ...]:
    """Start jobs in order; no job overtakes the first one that waits."""
    return tuple(BatchRound(snapshot, overtaking=False).decisions())


def easy_backfill(snapshot: Snapshot) -> tuple[Decision, ...]:
    """Backfill jobs that do not delay the first one that waits (EASY, as in most batch systems).

    The head gets a reservation where it starts soonest by the time limits of running jobs. Others start beside it, or
    on it if their own limits end before. If the start of the head is unknown, nothing is backfilled.
    """
    return tuple(BatchRound(snapshot, overtaking=True).decisions())


class BatchRound:
    """The decisions about one snapshot."""

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
        found: Sequence[GpuAssignment] | None = None
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
        """Reserve the placement where `head` starts soonest."""
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

    def _overtake(self, request: Request, at: datetime) -> Sequence[GpuAssignment] | None:
        """Return a backfill placement or None. A refused shape stays refused, since free resources only shrink."""
        soon = self._ends_by(request, at)
        shape = (soon, request.each, request.replicas)
        if shape in self.refused:
            return None
        found = (self.free if soon else self.beside).place(request)
        if found is None:
            self.refused.add(shape)
        return found

    def _start(self, request: Request, found: Sequence[GpuAssignment]) -> None:
        self.free.take_all(request.each, found)
        if self.at is not None:
            if not self._ends_by(request, self.at):
                self.then.take_all(request.each, found)
            self.beside.refresh(found, self.free, self.then)

    def _ends_by(self, request: Request, at: datetime) -> bool:
        return request.time_limit is not None and self.snapshot.now + request.time_limit <= at


class FreeNode:
    """Free resources of one node; `gpus` in thousandths of each GPU."""

    __slots__ = ("cpus", "gpus", "memory", "models", "shares")

    def __init__(self, node: Node) -> None:
        self.cpus, self.memory, self.shares = node.cpus, node.memory_bytes, node.shares
        self.models = [gpu.model for gpu in node.gpus]
        self.gpus = [WHOLE_GPU] * len(node.gpus)

    def copy(self) -> FreeNode:
        twin = FreeNode.__new__(FreeNode)
        twin.cpus, twin.memory, twin.shares = self.cpus, self.memory, self.shares
        twin.models, twin.gpus = self.models, self.gpus.copy()
        return twin

    def find(self, each: Resources) -> tuple[int, ...] | None:
        """Return the tightest fitting GPUs for one replica; None if it does not fit."""
        if each.cpus > self.cpus or each.memory_bytes > self.memory:
            return None
        if not each.gpus:
            return ()
        if each.gpu_milli < WHOLE_GPU and not self.shares:
            return None
        free = [
            (left, number)
            for number, left in enumerate(self.gpus)
            if left >= each.gpu_milli and (each.gpu_models is None or self.models[number] in each.gpu_models)
        ]
        return tuple(number for _, number in sorted(free)[: each.gpus]) if len(free) >= each.gpus else None

    def move(self, each: Resources, gpus: Iterable[int], sign: int) -> None:
        self.cpus += sign * each.cpus
        self.memory += sign * each.memory_bytes
        for number in gpus:
            self.gpus[number] += sign * each.gpu_milli

    def both(self, other: FreeNode) -> FreeNode:
        """Return what is free in both."""
        found = self.copy()
        found.cpus, found.memory = min(self.cpus, other.cpus), min(self.memory, other.memory)
        found.gpus = [min(pair) for pair in zip(self.gpus, other.gpus, strict=True)]
        return found


class FreeNodes:
    """Free resources of all nodes, simpler than the scheduler's own FreeCapacity."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.free_nodes = [FreeNode(node) for node in nodes]
        self._numbers = {node.name: number for number, node in enumerate(nodes)}
        self._gpus = [{gpu.id: number for number, gpu in enumerate(node.gpus)} for node in nodes]

    def copy(self) -> FreeNodes:
        return self._with([node.copy() for node in self.free_nodes])

    def both(self, other: FreeNodes) -> FreeNodes:
        return self._with(
            [mine.both(theirs) for mine, theirs in zip(self.free_nodes, other.free_nodes, strict=True)]
        )

    def refresh(self, places: Iterable[GpuAssignment], free: FreeNodes, then: FreeNodes) -> None:
        """Recompute the nodes of `places` as what is free in both."""
        for node in {place.node for place in places}:
            self.free_nodes[node] = free.free_nodes[node].both(then.free_nodes[node])

    def places_of(self, given: Iterable[Placement]) -> list[GpuAssignment]:
        """Return the assignments of placements, without those on lost nodes."""
        return [
            GpuAssignment(number, tuple(self._gpus[number][gpu] for gpu in placement.gpus))
            for placement in given
            if (number := self._numbers.get(placement.node)) is not None
        ]

    def take_all(self, each: Resources, places: Iterable[GpuAssignment]) -> None:
        for place in places:
            self.free_nodes[place.node].move(each, place.gpus, -1)

    def give_all(self, each: Resources, places: Iterable[GpuAssignment]) -> None:
        for place in places:
            self.free_nodes[place.node].move(each, place.gpus, 1)

    def place(self, request: Request) -> list[GpuAssignment] | None:
        """Return an assignment for every replica, or None; nothing is allocated."""
        found: list[GpuAssignment] = []
        for _ in range(request.replicas):
            place = self._tightest(request.each)
            if place is None:
                break
            self.take_all(request.each, [place])
            found.append(place)
        self.give_all(request.each, found)
        return found if len(found) == request.replicas else None

    def _tightest(self, each: Resources) -> GpuAssignment | None:
        best, tightest = None, (1 << 62, 1 << 62)
        for number, node in enumerate(self.free_nodes):
            gpus = node.find(each)
            if gpus is not None and (left := (sum(node.gpus), node.cpus)) < tightest:
                best, tightest = GpuAssignment(number, gpus), left
        return best

    def _with(self, free_nodes: list[FreeNode]) -> FreeNodes:
        twin = FreeNodes.__new__(FreeNodes)
        twin.free_nodes, twin._numbers, twin._gpus = free_nodes, self._numbers, self._gpus
        return twin


def placements(places: Sequence[GpuAssignment], nodes: Sequence[Node]) -> tuple[Placement, ...]:
    return tuple(
        Placement(
            replica=number,
            node=nodes[place.node].name,
            gpus=tuple(nodes[place.node].gpus[gpu].id for gpu in place.gpus),
        )
        for number, place in enumerate(places)
    )
