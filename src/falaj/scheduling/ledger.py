"""What is free, on each node and in each quota, as plain integers that are quick to count with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from falaj.records.residency import Label
from falaj.records.scheduling import Node, Placement, Quota, Request, Running

UNLIMITED = 1 << 80
END_OF_TIME = datetime.max.replace(tzinfo=UTC)


class Slot(NamedTuple):
    """What is free on one node, or held on it; bit i of `gpus` stands for its GPU i."""

    cpus: int
    memory: int
    gpus: int

    def take(self, held: Slot) -> Slot:
        return Slot(self.cpus - held.cpus, self.memory - held.memory, self.gpus & ~held.gpus)

    def give(self, held: Slot) -> Slot:
        return Slot(self.cpus + held.cpus, self.memory + held.memory, self.gpus | held.gpus)

    def both(self, other: Slot) -> Slot:
        """What is free here and there."""
        return Slot(min(self.cpus, other.cpus), min(self.memory, other.memory), self.gpus & other.gpus)


class Amount(NamedTuple):
    """A sum of resources, for quotas."""

    cpus: int
    gpus: int
    memory: int

    def covers(self, asked: Amount) -> bool:
        """A quota that is overdrawn in one resource still serves who asks for none of it."""
        return (
            asked.cpus <= self.cpus
            and (asked.gpus <= self.gpus or not asked.gpus)
            and (asked.memory <= self.memory or not asked.memory)
        )

    def less(self, other: Amount) -> Amount:
        return Amount(self.cpus - other.cpus, self.gpus - other.gpus, self.memory - other.memory)

    def plus(self, other: Amount) -> Amount:
        return Amount(self.cpus + other.cpus, self.gpus + other.gpus, self.memory + other.memory)

    def both(self, other: Amount) -> Amount:
        return Amount(min(self.cpus, other.cpus), min(self.gpus, other.gpus), min(self.memory, other.memory))


def total(request: Request) -> Amount:
    """What the whole gang holds."""
    each, replicas = request.each, request.replicas
    return Amount(each.cpus * replicas, each.gpus * replicas, each.memory_bytes * replicas)


def limit(quota: Quota) -> Amount:
    named = (quota.cpus, quota.gpus, quota.memory_bytes)
    return Amount(*(UNLIMITED if figure is None else figure for figure in named))


Rank = tuple[int, datetime, str]


def rank(request: Request) -> Rank:
    """Whose turn comes first: priority, then submission, then the name, so that no two are equal."""
    return -request.priority, request.submitted_at, request.job


class Held(NamedTuple):
    """What one running job holds. Jobs that started at one moment are as old as their ranks say."""

    ends_by: datetime
    started_at: datetime
    rank: Rank
    queue: str
    amount: Amount
    on: tuple[tuple[int, Slot], ...]

    @property
    def ends(self) -> bool:
        """Whether its end is known."""
        return self.ends_by != END_OF_TIME

    @property
    def age(self) -> tuple[datetime, Rank]:
        return self.started_at, self.rank


class Cluster:
    """The nodes in the order of their names, whatever the order in which they were given."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.name)
        self.idle = [Slot(n.cpus, n.memory_bytes, (1 << len(n.gpus)) - 1) for n in self.nodes]
        self.all = range(len(self.nodes))
        self._index = {node.name: index for index, node in enumerate(self.nodes)}
        self._bits = [{gpu.id: 1 << bit for bit, gpu in enumerate(n.gpus)} for n in self.nodes]
        self._permitted: dict[frozenset[str] | None, list[int]] = {}

    def permitted(self, label: Label) -> list[int]:
        """The nodes on which bytes under `label` may lie."""
        if label.only not in self._permitted:
            found = [i for i, node in enumerate(self.nodes) if label.permits(node.jurisdiction)]
            self._permitted[label.only] = found
        return self._permitted[label.only]

    def held_by(self, running: Running) -> Held:
        request = running.request
        return Held(
            running.ends_by or END_OF_TIME,
            running.started_at,
            rank(request),
            request.queue,
            total(request),
            self.slots_of(request, running.placements),
        )

    def slots_of(self, request: Request, placements: Sequence[Placement]) -> tuple[tuple[int, Slot], ...]:
        """What the replicas hold, node by node; a node that is lost holds nothing."""
        each = request.each
        found = []
        for placement in placements:
            index = self._index.get(placement.node)
            if index is not None:
                bits = self._bits[index]
                mask = sum(bits.get(gpu, 0) for gpu in placement.gpus)
                found.append((index, Slot(each.cpus, each.memory_bytes, mask)))
        return tuple(found)
