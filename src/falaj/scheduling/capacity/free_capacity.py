"""Free resources on the nodes during a scheduling round, and where the groups of jobs run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from falaj.records.scheduling.snapshot import Request
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.capacity.resources import Allocation, NodeResources

if TYPE_CHECKING:
    from falaj.scheduling.capacity.reservation import Reservation

NodeAllocations = tuple[tuple[int, NodeResources], ...]


class FreeCapacity:
    """Free resources of every node of the cluster, exact to the device, in four views.

    `unallocated` is what neither a job nor others hold. `after_evictions` adds what preemption victims still hold, on
    the nodes where they run. `free` is unallocated and not nominated for preemptors. `open` is free and not reserved
    for the head: a job of any length may take it. `log` lists each node whose `open` changed, in order.

    `placement.fleet.Fleet` holds the same free resources as arrays, for scoring all nodes at once.
    """

    def __init__(self, cluster: Cluster, held: Iterable[Allocation]) -> None:
        self.cluster = cluster
        held = list(held)
        self.unallocated = left_by_others(cluster, held)
        self.after_evictions: dict[int, NodeResources] = {}
        self.nominated: dict[int, NodeResources] = {}
        self.head: Reservation | None = None
        leaving = []
        for job in held:
            if job.leaving:
                leaving.append(job)
                continue
            for index, slot in job.on:
                self.unallocated[index] = self.unallocated[index].take(slot)
        for job in leaving:
            for index, _ in job.on:
                self.after_evictions.setdefault(index, self.unallocated[index])
        for job in leaving:
            for index, slot in job.on:
                self.unallocated[index] = self.unallocated[index].take(slot)
        self.free = list(self.unallocated)
        self.open = list(self.unallocated)
        self.log: list[int] = []

    def hold(self, held: Allocation) -> None:
        """Allocate a job that has started."""
        for index, slot in held.on:
            self.unallocated[index] = self.unallocated[index].take(slot)
            if index in self.after_evictions:
                self.after_evictions[index] = self.after_evictions[index].take(slot)
            if index in self.nominated:
                self.nominated[index] = self.nominated[index].take(slot)
            if self.head is not None:
                self.head.note(index, slot, held)
        self.refresh(index for index, _ in held.on)

    def vacate(self, held: Allocation) -> None:
        """Count a running job as a preemption victim."""
        for index, slot in held.on:
            self.after_evictions[index] = self.after_evictions.get(index, self.unallocated[index]).give(slot)

    def nomination(self, left: Mapping[int, NodeResources]) -> None:
        """Set what nominations leave free on their nodes once the victims have stopped."""
        touched = self.nominated.keys() | left.keys()
        self.nominated = dict(left)
        self.refresh(touched)

    def keep(self, head: Reservation) -> None:
        self.head = head
        self.refresh(head.then)

    def refresh(self, nodes: Iterable[int]) -> None:
        for index in nodes:
            slot = self.unallocated[index]
            if index in self.nominated:
                slot = slot.both(self.nominated[index])
            self.free[index] = slot
            if self.head is not None and index in self.head.then:
                slot = slot.both(self.head.then[index])
            self.open[index] = slot
            self.log.append(index)

    def after_leaving(self) -> list[NodeResources]:
        """Return what is free once the victims have stopped."""
        slots = list(self.unallocated)
        for index, slot in self.after_evictions.items():
            slots[index] = slot
        return slots

    def after_nominations(self) -> list[NodeResources]:
        """Return what is free once the victims have stopped and the nominated jobs have started."""
        slots = self.after_leaving()
        for index, slot in self.nominated.items():
            slots[index] = slot
        return slots


def left_by_others(cluster: Cluster, held: Iterable[Allocation]) -> list[NodeResources]:
    """Return what each node has beside what others than this platform hold of it."""
    slots = list(cluster.idle)
    if not cluster.shared_with_others:
        return slots
    taken: dict[int, int] = {}
    for job in held:
        for index, slot in job.on:
            taken[index] = taken.get(index, 0) | slot.gpus
    for index in cluster.shared_with_others:
        slots[index] = slots[index].take(cluster.held_by_others(index, taken.get(index, 0)))
    return slots


class GroupAffinity:
    """The nodes on which each group of jobs runs, for affinity and anti-affinity between groups."""

    def __init__(self, held: Iterable[Allocation]) -> None:
        self._near: dict[str, set[int]] = {}
        self._there: dict[str, set[int]] = {}
        self._repels: dict[str, set[int]] = {}
        for job in held:
            self.hold(job)
        self._near = {group: set(nodes) for group, nodes in self._there.items()}

    def hold(self, held: Allocation) -> None:
        group, apart = held.request.group, held.request.affinity.apart
        if group is None and not apart:
            return
        nodes = {index for index, _ in held.on}
        if group is not None:
            self._there.setdefault(group, set()).update(nodes)
        for other in apart:
            self._repels.setdefault(other, set()).update(nodes)

    def matters(self, request: Request) -> bool:
        affinity = request.affinity
        return bool(affinity.near or affinity.apart or (request.group and request.group in self._repels))

    def suits(self, request: Request, nodes: Iterable[int]) -> list[int]:
        """Return the nodes that run a job of each `near` group and none of an `apart` group.

        For `near` only jobs that ran when the round began count, so that a refusal stays valid during the round.
        """
        found = set(nodes)
        for group in request.affinity.near:
            found &= self._near.get(group, set())
        for group in request.affinity.apart:
            found -= self._there.get(group, set())
        if request.group is not None:
            found -= self._repels.get(request.group, set())
        return sorted(found)
