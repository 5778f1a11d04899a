"""What is free on the nodes while decisions are made, and for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from falaj.records.scheduling.snapshot import Request
from falaj.scheduling.deciding.cluster import Cluster
from falaj.scheduling.deciding.ledger import Held, Slot

if TYPE_CHECKING:
    from falaj.scheduling.deciding.reservation import Reservation

On = tuple[tuple[int, Slot], ...]


class Ground:
    """Four views of the nodes.

    `raw` is what nobody holds. `vacant` is that and what those hold who were told to leave, on the nodes where such
    jobs run. `free` is what is not promised to those that they leave for. `open` is what a job may take that runs on
    for long: free, and not kept for the head. `log` names each node whose `open` changed, in order.
    """

    def __init__(self, cluster: Cluster, held: Iterable[Held]) -> None:
        self.cluster = cluster
        self.raw = list(cluster.idle)
        self.vacant: dict[int, Slot] = {}
        self.promised: dict[int, Slot] = {}
        self.head: Reservation | None = None
        leaving = []
        for job in held:
            if job.leaving:
                leaving.append(job)
                continue
            for index, slot in job.on:
                self.raw[index] = self.raw[index].take(slot)
        for job in leaving:
            for index, _ in job.on:
                self.vacant.setdefault(index, self.raw[index])
        for job in leaving:
            for index, slot in job.on:
                self.raw[index] = self.raw[index].take(slot)
        self.free = list(self.raw)
        self.open = list(self.raw)
        self.log: list[int] = []

    def hold(self, held: Held) -> None:
        """A job has started."""
        for index, slot in held.on:
            self.raw[index] = self.raw[index].take(slot)
            if index in self.vacant:
                self.vacant[index] = self.vacant[index].take(slot)
            if index in self.promised:
                self.promised[index] = self.promised[index].take(slot)
            if self.head is not None:
                self.head.note(index, slot, held)
        self.refresh(index for index, _ in held.on)

    def vacate(self, held: Held) -> None:
        """A running job is told to leave."""
        for index, slot in held.on:
            self.vacant[index] = self.vacant.get(index, self.raw[index]).give(slot)

    def promise(self, left: Mapping[int, Slot]) -> None:
        """`left` is what the promised places leave of the nodes that they are on, once the leaving are gone."""
        touched = self.promised.keys() | left.keys()
        self.promised = dict(left)
        self.refresh(touched)

    def keep(self, head: Reservation) -> None:
        self.head = head
        self.refresh(head.then)

    def refresh(self, nodes: Iterable[int]) -> None:
        for index in nodes:
            slot = self.raw[index]
            if index in self.promised:
                slot = slot.both(self.promised[index])
            self.free[index] = slot
            if self.head is not None and index in self.head.then:
                slot = slot.both(self.head.then[index])
            self.open[index] = slot
            self.log.append(index)

    def to_come(self) -> list[Slot]:
        """What is free once the leaving are gone."""
        slots = list(self.raw)
        for index, slot in self.vacant.items():
            slots[index] = slot
        return slots

    def spared(self) -> list[Slot]:
        """What is free once the leaving are gone and those have started that they leave for."""
        slots = self.to_come()
        for index, slot in self.promised.items():
            slots[index] = slot
        return slots


class Company:
    """Which groups of jobs run where, for jobs that want to be near some and apart from others."""

    def __init__(self, held: Iterable[Held]) -> None:
        self._near: dict[str, set[int]] = {}
        self._there: dict[str, set[int]] = {}
        self._repels: dict[str, set[int]] = {}
        for job in held:
            self.hold(job)
        self._near = {group: set(nodes) for group, nodes in self._there.items()}

    def hold(self, held: Held) -> None:
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
