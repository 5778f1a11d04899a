"""What is free on the nodes while decisions are made, and for whom."""

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
    """Four views of the nodes.

    `raw` is what nobody holds. `vacant` is that and what those hold who were told to leave, on the nodes where such
    jobs run. `free` is what is not promised to those that they leave for. `open` is what a job may take that runs on
    for long: free, and not kept for the head. `log` names each node whose `open` changed, in order.
    """

    def __init__(self, cluster: Cluster, held: Iterable[Allocation]) -> None:
        self.cluster = cluster
        self.unallocated = list(cluster.idle)
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
        """A job has started."""
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
        """A running job is told to leave."""
        for index, slot in held.on:
            self.after_evictions[index] = self.after_evictions.get(index, self.unallocated[index]).give(slot)

    def nomination(self, left: Mapping[int, NodeResources]) -> None:
        """`left` is what the promised places leave of the nodes that they are on, once the leaving are gone."""
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
        """What is free once the leaving are gone."""
        slots = list(self.unallocated)
        for index, slot in self.after_evictions.items():
            slots[index] = slot
        return slots

    def after_nominations(self) -> list[NodeResources]:
        """What is free once the leaving are gone and those have started that they leave for."""
        slots = self.after_leaving()
        for index, slot in self.nominated.items():
            slots[index] = slot
        return slots


class GroupAffinity:
    """Which groups of jobs run where, for jobs that want to be near some and apart from others."""

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
        """Those of the nodes beside one of each group that it wants near, and beside none that it is to be apart from.

        Near is who ran when the round began, so that what was refused in a round stays refused in it.
        """
        found = set(nodes)
        for group in request.affinity.near:
            found &= self._near.get(group, set())
        for group in request.affinity.apart:
            found -= self._there.get(group, set())
        if request.group is not None:
            found -= self._repels.get(request.group, set())
        return sorted(found)
